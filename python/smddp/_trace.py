"""`smddp trace`: the ranks' dumps as one trace in the format of chrome://tracing, which Perfetto reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smddp import stragglers
from smddp._bars import drawn


def merged(dumps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One process for each rank, one line for each of its groups' collectives and one for its messages, one bar for
    each operation; what never ended reaches to the time of its dump. Times are microseconds since the first operation
    of all, by each host's clock."""
    lines = [ops for dump in dumps for group in dump["groups"] for _, ops in _lines(group)]
    starts = [op["submitted_ns"] for ops in lines for op in ops]
    first = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for place, dump in enumerate(dumps):
        rank = dump["rank"]
        name = f"rank {'?' if rank is None else rank} (host {dump['host']}, pid {dump['pid']})"
        order = place if rank is None else rank
        events.append({"ph": "M", "pid": place, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": place, "name": "process_sort_index", "args": {"sort_index": order}})
        for line, (name, ops) in enumerate(found for group in dump["groups"] for found in _lines(group)):
            events.append({"ph": "M", "pid": place, "tid": line, "name": "thread_name", "args": {"name": name}})
            events += [_bar(op, place, line, first, dump["time_ns"]) for op in ops]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lines(group: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    name = f"group {group['name']} ({group['way']})"
    found = [(name, group["operations"]), (f"{name}: send and recv", group["messages"])]
    return [(name, ops) for name, ops in found if ops] or found[:1]


def _bar(op: dict[str, Any], place: int, line: int, first: int, now: int) -> dict[str, Any]:
    begin = op["started_ns"] or op["submitted_ns"]
    return {
        "ph": "X",
        "pid": place,
        "tid": line,
        "name": op["what"],
        "cat": op["outcome"],
        "ts": (begin - first) / 1000,
        "dur": max((op["ended_ns"] or now) - begin, 0) / 1000,
        "args": {key: op[key] for key in ("call", "bytes", "algorithm", "outcome", "seq")},
    }


def main(names: Sequence[str], output: str) -> int:
    """Returns 1, with a line about the file, where one is no dump."""
    dumps = []
    for name in names:
        try:
            dumps.append(json.loads(Path(name).read_text()))
            merged(dumps[-1:])
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"smddp trace: {name} is no dump: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    trace = merged(dumps)
    picture = output.endswith(".svg")
    Path(output).write_text(drawn(trace) if picture else json.dumps(trace))
    bars = sum(event["ph"] == "X" for event in trace["traceEvents"])
    where = "" if picture else "; open it at https://ui.perfetto.dev"
    print(f"{output}: {bars} operations of {len(dumps)} processes{where}")
    for late in stragglers.told(dumps):
        print(late)
    return 0
