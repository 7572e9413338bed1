"""`smddp.report()`: one table of this process's groups from its traffic totals and the recorder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from smddp._native import core
from smddp.observability import status, stragglers
from smddp.observability.info import traffic
from smddp.observability.predictions import Predictions, Predictor, ratios
from smddp.text import format_size, printable

# Maximum time for predictions of one report.
_SIMULATION_SECONDS = 1.0
_HEAD = ("GROUP", "RANKS", "COLLECTIVE", "CALLS", "BYTES", "MEDIAN", "TOTAL", "WAITING", "MEASURED/PREDICTED")


def report() -> str:
    """Returns the table, and a line for each straggler among the ranks of this host."""
    own = json.loads(core().dump())
    job = status.job() if own["groups"] else []
    predictions = Predictions(_SIMULATION_SECONDS)
    predictions.begin()
    return "\n".join(lines(own, traffic(), job, predictions))


def lines(
    own: Mapping[str, Any],
    moved: Sequence[Mapping[str, Any]],
    job: Sequence[dict[str, Any]],
    predict: Predictor = lambda _group, _op: None,
) -> list[str]:
    """Returns the lines of a report.

    own: the dump of this process. moved: the result of `smddp.traffic()`. job: dumps of this host's ranks, if known.
    predict: predicted time of an operation.
    """
    rank = "?" if own["rank"] is None else own["rank"]
    head = f"smddp: rank {rank} (host {own['host']}, pid {os.getpid()})"
    # The recorder keeps groups for a while after they are closed.
    groups = [group for group in own["groups"] if any(entry["group"] == group["name"] for entry in moved)]
    if not groups:
        return [head, "no open group of smddp in this process has made a call"]
    rows: list[tuple[str, ...]] = [_HEAD]
    longest, kept = 0.0, 0
    for group in groups:
        over = [op for op in group["operations"] if op["outcome"] == "ok"]
        if over:
            longest = max(longest, (over[-1]["ended_ns"] - over[0]["submitted_ns"]) / 1e9)
            kept = max(kept, len(over))
        rows += _rows(group, over, moved, _last_calls(group, job), predict)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    foot = f"times: the newest {kept} operations of each group (SMDDP_RECORDER), over {longest:.1f} s"
    return [printable(head), *table, foot, *(printable(late) for late in stragglers.find(job))]


def _rows(
    group: Mapping[str, Any],
    over: Sequence[Mapping[str, Any]],
    moved: Sequence[Mapping[str, Any]],
    last: Mapping[int, int],
    predict: Predictor,
) -> list[tuple[str, ...]]:
    """Returns the row of each collective of a group. last: time of the last rank's call, by sequence number."""
    totals: dict[str, list[int]] = {}
    for entry in moved:
        if entry["group"] == group["name"]:
            total = totals.setdefault(entry["collective"], [0, 0])
            total[0] += entry["operations"]
            total[1] += entry["bytes"]
    compared = ratios(group, over, predict, last)
    rows = []
    for collective, (calls, size) in sorted(totals.items()):
        ops = [op for op in over if op["what"].partition(" ")[0] == collective]
        seconds = [op["seconds"] for op in ops]
        known = [op for op in ops if op["seq"] in last]
        spent = sum(op["seconds"] for op in known)
        waited = sum(min(max(last[op["seq"]] - op["submitted_ns"], 0) / 1e9, op["seconds"]) for op in known)
        row = (
            group["name"],
            str(group["size"]),
            collective,
            str(calls),
            format_size(size),
            f"{median(seconds) * 1e3:.2f} ms" if seconds else "-",
            f"{sum(seconds):.1f} s" if seconds else "-",
            f"{waited / spent:.0%}".replace("%", " %") if spent else "-",
            f"{compared[collective]:.1f}" if collective in compared else "-",
        )
        rows.append(tuple(printable(cell) for cell in row))
    return rows


def _last_calls(group: Mapping[str, Any], job: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Returns the time in ns at which the last rank of this host made each call, by sequence number."""
    members = [
        {op["seq"]: op["submitted_ns"] for op in other["operations"]}
        for process in job
        for other in process["groups"]
        if (other["name"], other["size"]) == (group["name"], group["size"])
    ]
    if len(members) < 2:
        return {}
    return {seq: max(calls[seq] for calls in members) for seq in set(members[0]).intersection(*members[1:])}
