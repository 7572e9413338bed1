"""`smddp trace`: merges the ranks' dumps into one trace in the format of chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smddp import files
from smddp.observability import dumps, stragglers
from smddp.observability.timeline import drawn
from smddp.text import printable


def merged(dumps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the trace: one process per rank, one line per group for collectives and one for messages.

    Each operation is one bar; a running one reaches to the time of its dump. Times are microseconds since the first
    operation of all ranks, by each host's clock.
    """
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
    """Writes the trace of the dumps in `names`, which are files or folders.

    Returns 1 for an invalid dump, 2 if `output` cannot be written, each with a line on standard error.
    """
    found = []
    try:
        paths = [path for name in names for path in _files(Path(name))]
    except (OSError, ValueError) as error:
        return _failed(_reason(error), 1)
    for path in paths:
        try:
            found.append(dumps.parse(files.read_text(path)))
        except (OSError, ValueError) as error:
            return _failed(f"{path} is not a dump: {_reason(error)}", 1)
    trace = merged(found)
    picture = output.endswith(".svg")
    try:
        files.write_text(output, drawn(trace) if picture else json.dumps(trace))
    except OSError as error:
        return _failed(f"--output {output}: {_reason(error)}", 2)
    bars = sum(event["ph"] == "X" for event in trace["traceEvents"])
    where = "" if picture else "; open it at https://ui.perfetto.dev"
    print(printable(f"{output}: {bars} operations of {len(found)} processes{where}"))
    for late in stragglers.find(found):
        print(printable(late))
    return 0


def _files(path: Path) -> list[Path]:
    """Returns the dump files of a name. Raises ValueError for a folder without dumps or with dumps of several jobs."""
    if not path.is_dir():
        return [path]
    # File names of `smddp status --dump` and SMDDP_DUMP_DIR; a trace may be in the same folder.
    found = sorted(path.glob("smddp-*.json")) or sorted(path.glob("*.json"))
    jobs = sorted(folder for folder in path.glob("job-*") if any(folder.glob("*.json")))
    if found or len(jobs) == 1:
        return found or _files(jobs[0])
    if jobs:
        raise ValueError(f"{path} has dumps of {len(jobs)} jobs: give one of {', '.join(map(str, jobs))}")
    raise ValueError(f"{path} has no dump (*.json)")


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _failed(text: str, status: int) -> int:
    print(f"smddp trace: {printable(text)}", file=sys.stderr)
    return status
