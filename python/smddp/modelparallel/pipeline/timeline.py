"""A step as one row per stage: the plan in letters, and a trace of plan and measurement side by side."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from smddp.modelparallel.pipeline.schedule import Simulated

# (piece, "F" or "B"; microbatch; from; to), in seconds of one clock.
Piece = tuple[str, int, float, float]
_WIDEST = 100
_NAMES = {"F": "forward", "B": "backward"}


def drawn(plan: Simulated, stages: int) -> list[str]:
    """Draw the plan as text, one column per unit of time.

    A digit is a forward pass of that microbatch, a letter a backward pass, ``a`` that of microbatch 0. Longer plans are
    cut off.
    """
    rows = [["."] * int(plan.length) for _ in range(stages)]
    for stage, number, piece, begin, end in plan.pieces:
        mark = str(number % 10) if piece == "F" else chr(ord("a") + number % 26)
        for column in range(int(begin), int(end)):
            rows[stage][column] = mark
    longer = " ..." if plan.length > _WIDEST else ""
    return [f"stage {stage}  {''.join(row[:_WIDEST])}{longer}" for stage, row in enumerate(rows)]


def passes(pieces: Sequence[Sequence[Piece]]) -> tuple[list[int], list[float], float]:
    """Summarize a microbatch from the pieces of each stage.

    Returns its stages in order, the mean seconds of each visit's forward pass, and the ratio of backward to forward
    time.
    """
    visits: list[int] = []
    seconds: list[list[float]] = []
    total = {"F": 0.0, "B": 0.0}
    forward: defaultdict[int, list[tuple[float, int, float]]] = defaultdict(list)
    for stage, own in enumerate(pieces):
        for piece, number, begin, end in own:
            total[piece] += end - begin
            if piece == "F":
                forward[number].append((begin, stage, end - begin))
    for number in sorted(forward):
        groups = [(s, sum(x[2] for x in run)) for s, run in itertools.groupby(sorted(forward[number]), lambda x: x[1])]
        if not visits:
            visits, seconds = [stage for stage, _ in groups], [[] for _ in groups]
        if [stage for stage, _ in groups] == visits:
            for kept, (_, took) in zip(seconds, groups):
                kept.append(took)
    return visits, [sum(kept) / len(kept) for kept in seconds], total["B"] / total["F"] if total["F"] else 0.0


def trace(
    names: Sequence[str], pieces: Sequence[Sequence[Piece]], simulate: Callable[..., Simulated]
) -> dict[str, Any]:
    """Return a trace in Chrome's format with the planned and measured pieces of each stage.

    ``simulate(visits, forward, backward, shares)`` makes the plan. Pieces of several hosts are by each one's clock.
    """
    visits, shares, longer = passes(pieces)
    plan = simulate(visits, 1.0, longer, shares) if visits else Simulated()
    planned: list[list[Piece]] = [[] for _ in names]
    for stage, number, piece, begin, end in plan.pieces:
        planned[stage].append((piece, number, begin, end))
    start = min((begin for own in pieces for _, _, begin, _ in own), default=0.0)
    events: list[dict[str, Any]] = []
    for stage, name in enumerate(names):
        events.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": stage, "name": "process_sort_index", "args": {"sort_index": stage}})
        for track, (what, own, first) in enumerate((("plan", planned[stage], 0.0), ("measured", pieces[stage], start))):
            events.append({"ph": "M", "pid": stage, "tid": track, "name": "thread_name", "args": {"name": what}})
            events += [_bar(each, stage, track, first) for each in own]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _bar(piece: Piece, stage: int, track: int, first: float) -> dict[str, Any]:
    what, number, begin, end = piece
    return {
        "ph": "X",
        "pid": stage,
        "tid": track,
        "name": f"{_NAMES[what]} #{number}",
        "cat": "done",
        "ts": (begin - first) * 1e6,
        "dur": (end - begin) * 1e6,
        "args": {"microbatch": number},
    }
