"""The text of `smddp info`."""

from __future__ import annotations

import textwrap
from typing import Any

from smddp.observability.machine import size

_NAME = 28
# A column narrower than this is harder to read than a long line.
_LEAST = 40


def lines(found: dict[str, Any], ranks: int, columns: int) -> list[str]:
    """What `found` holds, in lines of at most that many columns.

    found: as `smddp info --json` prints it. ranks: of how many processes its paths are.
    """

    def rows(title: str, rows: list[tuple[str, str]]) -> list[str]:
        return ["", title, *(line for name, text in rows for line in _row(name, text, columns))] if rows else []

    told = [f"smddp {found['version']}   torch {found['torch'] or 'not installed'}"]
    told += rows("WRONG", [("", problem) for problem in found["problems"]])
    told += rows("no such setting", [("", unknown(*names)) for names in found["unknown settings"].items()])
    told += rows("machine", [(name, _machine(name, value)) for name, value in found["machine"].items()])
    told += rows("around it", list(found["surroundings"].items()))
    told += rows("CUDA", cuda(found["cuda"]))
    told += rows("libfabric", [("", line) for line in found["libfabric"]])
    told += rows(
        f"paths of {ranks} processes on this machine",
        [
            (name, "; ".join(f"{amount}: {way}" for amount, way in ways.items()))
            for name, ways in found["paths"].items()
        ],
    )
    told += rows(
        "settings: value (where it comes from), and what it does",
        [
            (name, f"{row['value'] or 'empty'} ({row['from']}): {row['what']}")
            for name, row in found["settings"].items()
        ],
    )
    return told


def unknown(name: str, nearest: str | None) -> str:
    return f"{name}: smddp has no such setting" + (f"; did you mean {nearest}?" if nearest else "")


def cuda(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of each line about CUDA."""
    if not found["found"]:
        return [("", f"CUDA tensors are not served: {found['why']}")]
    return [("driver", found["driver"]), *(("", device) for device in found["devices"]), *found["paths"].items()]


def _machine(name: str, value: Any) -> str:
    return size(value) if name.startswith("staging_") or name == "symmetric_in_use" else str(value)


def _row(name: str, text: str, columns: int) -> list[str]:
    """A name and its text, which goes on below itself where the line is full."""
    indent = 2 + (_NAME if name else 0)
    width = max(columns - indent, _LEAST)
    first, *rest = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    head = f"  {name:<{_NAME}}" if name else "  "
    if name and len(name) >= _NAME:
        return [f"  {name}", *(" " * indent + line for line in (first, *rest))]
    return [(head + first).rstrip(), *(" " * indent + line for line in rest)]
