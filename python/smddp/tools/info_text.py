"""Text output of `smddp info`."""

from __future__ import annotations

import textwrap
from typing import Any

from smddp.text import format_size, suggestion

_NAME = 28
# Minimum column width; a long line is easier to read than a narrower column.
_LEAST = 40


def lines(found: dict[str, Any], ranks: int, columns: int) -> list[str]:
    """Returns the text, wrapped to `columns`.

    found: content of `smddp info --json`. ranks: number of processes for its paths.
    """

    def rows(title: str, rows: list[tuple[str, str]]) -> list[str]:
        return ["", title, *(line for name, text in rows for line in _row(name, text, columns))] if rows else []

    text_lines = [f"smddp {found['version']}   torch {found['torch'] or 'not installed'}"]
    text_lines += rows("Problems", [("", problem) for problem in found["problems"]])
    text_lines += rows("unknown settings", [("", unknown(*names)) for names in found["unknown settings"].items()])
    machine = [(name, value) for name, value in found["machine"].items() if name != "version"]
    text_lines += rows("machine", [(name.replace("_", " "), _machine(name, value)) for name, value in machine])
    text_lines += rows("Environment", list(found["surroundings"].items()))
    text_lines += rows("CUDA", cuda(found["cuda"]))
    text_lines += rows("libfabric", [("", line) for line in found["libfabric"]])
    text_lines += rows(
        f"paths of {ranks} processes on this machine",
        _paths(found["paths"]),
    )
    text_lines += rows(
        "settings: value (source), and description",
        [
            (name, f"{row['value'] or 'empty'} ({row['from']}): {row['what']}")
            for name, row in found["settings"].items()
        ],
    )
    text_lines += rows(
        "Deprecated settings",
        [(name, _deprecated(row)) for name, row in found["deprecated settings"].items()],
    )
    return text_lines


def _paths(found: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    """Returns the collectives with equal paths, and these. A collective without data has one path."""
    rows: dict[str, list[str]] = {}
    for name, paths in found.items():
        same = name == "barrier" or len(set(paths.values())) == 1
        text = next(iter(paths.values())) if same else "; ".join(f"{size}: {path}" for size, path in paths.items())
        rows.setdefault(text, []).append(name)
    return [(", ".join(names), text) for text, names in rows.items()]


def unknown(name: str, nearest: str | None) -> str:
    return f"{name}: unknown setting{suggestion(nearest)}"


def _deprecated(row: dict[str, Any]) -> str:
    value = f"{row['value']} (environment): " if row["value"] else ""
    return f"{value}use {row['replacement']} ({row['equivalents']})"


def cuda(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (name, text) of each line about CUDA."""
    if not found["found"]:
        return [("", f"CUDA tensors are not supported: {found['why'].removeprefix('CUDA tensors: ')}")]
    return [("driver", found["driver"]), *(("", device) for device in found["devices"]), *found["paths"].items()]


def _machine(name: str, value: Any) -> str:
    return format_size(value) if name.startswith("staging_") or name == "symmetric_in_use" else str(value)


def _row(name: str, text: str, columns: int) -> list[str]:
    """Returns the lines of a name and its wrapped text."""
    indent = 2 + (_NAME if name else 0)
    width = max(columns - indent, _LEAST)
    first, *rest = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
    head = f"  {name:<{_NAME}}" if name else "  "
    if name and len(name) >= _NAME:
        return [f"  {name}", *(" " * indent + line for line in (first, *rest))]
    return [(head + first).rstrip(), *(" " * indent + line for line in rest)]
