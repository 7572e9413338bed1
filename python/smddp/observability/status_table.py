"""Table of `smddp status`: a row for each group of each process, within the width of the terminal.

Not by `rich`: this table and the doctor's report need few lines, and the wheel has no dependencies. With an optional
extra, the plain form would remain and each table would have two forms to test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smddp.observability import waits
from smddp.text import format_size, printable

_COLUMNS = (
    "HOST",
    "RANK",
    "PID",
    "GROUP",
    "IN GROUP",
    "OPERATION",
    "ELAPSED",
    "LAST FINISHED",
    "ALGORITHM",
    "FRAME",
)
#: Columns that are omitted in this order if the table is too wide.
_OPTIONAL = ("ALGORITHM", "LAST FINISHED", "IN GROUP")
#: Minimum width of the last column, its width below which other columns are omitted, and maximum characters of any
#: other cell and of the last one.
_LEAST_FRAME, _USUAL_FRAME, _MOST_CELL, _MOST_FRAME = 32, 40, 60, 400
#: Rows of one process.
_MOST_GROUPS = 4
#: Folders of a file name in frames.
_FOLDERS = re.compile(r"(?:(?<= )|^)[^ ]*/(?=[^ /]+:\d)")


def rows(answers: Sequence[dict[str, Any]], columns: int) -> list[str]:
    """Returns the lines of the table, of at most `columns` characters if the terminal has 80 or more."""
    table = [dict(zip(_COLUMNS, _COLUMNS))]
    table += [row for one in answers for row in _rows(one)]
    if len(table) == 1:
        return []
    shown = [name for name in _COLUMNS if name != "HOST" or len({one["host"] for one in answers}) > 1]
    widths = {name: max(len(row[name]) for row in table) for name in shown}
    for name in _OPTIONAL:
        if _width({**widths, "FRAME": min(widths["FRAME"], _USUAL_FRAME)}) > columns:
            del widths[name]
    frame = max(columns - _width({**widths, "FRAME": 0}), _LEAST_FRAME)
    lines = []
    for row in table:
        cells = [row[name].ljust(width) for name, width in widths.items() if name != "FRAME"]
        lines.append("  ".join([*cells, _fit(row["FRAME"], frame)]).rstrip())
    return lines


def _width(widths: dict[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _fit(frames: str, most: int) -> str:
    """Returns the frames within `most` characters: without folders if they are too long, innermost first."""
    return frames if len(frames) <= most else _cut(_FOLDERS.sub("", frames), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _rows(one: dict[str, Any]) -> list[dict[str, str]]:
    """Returns the rows of a process. Idle groups are omitted first if it has many."""
    groups = one["groups"]
    if not groups:
        return [_row(one, None)]

    def rank(at: int) -> tuple[Any, ...]:
        group = groups[at]
        return group["present"] is None, not group["error"], -group["size"], at

    shown = sorted(sorted(range(len(groups)), key=rank)[:_MOST_GROUPS])
    rows = [_row(one, groups[at]) for at in shown]
    if len(groups) > len(shown):
        more = dict.fromkeys(_COLUMNS, "")
        rows.append(
            {**more, "RANK": rows[0]["RANK"], "PID": rows[0]["PID"], "GROUP": f"+{len(groups) - len(shown)} more"}
        )
    return rows


def _row(one: dict[str, Any], group: dict[str, Any] | None) -> dict[str, str]:
    rank = "-" if one["rank"] is None else str(one["rank"])
    cells = [one["host"], rank, str(one["pid"])]
    cells += ["-"] * 6 if group is None else _of_group(group)
    shown = [_cut(printable(cell), _MOST_CELL) for cell in cells]
    return dict(zip(_COLUMNS, [*shown, _cut(printable(one["at"]), _MOST_FRAME)]))


def _of_group(group: dict[str, Any]) -> list[str]:
    present, last = group["present"], group["last"]
    operation, elapsed = ("-", "-") if present is None else (present["what"], f"{present['seconds']:.1f} s")
    states = {call["what"]: waits.waits_in(call) for call in waits.pending(group)}
    # No thread waits in it.
    operation += " (posted)" if states.get(operation) is False else ""
    totals: dict[str, int] = {}
    for entry in group["taken"]:
        totals[entry["algorithm"]] = totals.get(entry["algorithm"], 0) + entry["bytes"]
    moved = ", ".join(f"{name} {format_size(total)}" for name, total in totals.items())
    return [
        group["name"],
        f"{group['rank']} of {group['size']}",
        "failed" if group["error"] else operation,
        elapsed,
        "-" if last is None else last["what"],
        f"{group['way']}: {moved}" if moved else group["way"],
    ]
