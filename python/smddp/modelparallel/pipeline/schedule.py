"""Scheduling of the work of a stage. Pure functions: tests simulate pipelines up to 8 stages and 16 microbatches.

A stage runs one microbatch at a time, and switches when it waits for another stage. Microbatches start in the same
order on every stage, so no other microbatch delays the oldest unfinished one. Its messages are in transit or have
arrived, and a schedule cannot deadlock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

FORWARD, BACKWARD, DONE = range(3)


class MicrobatchProgress:
    """One microbatch on one stage.

    Attributes:
        phase: FORWARD until the step function has ended, BACKWARD until all segments are through, DONE.
        segment: in the backward phase, the segment that is next; they run from the last to the first.
        waiting: True until the message that it needs from another stage arrives.
    """

    __slots__ = ("number", "phase", "segment", "started", "waiting")

    def __init__(self, number: int) -> None:
        self.number, self.phase, self.segment, self.started, self.waiting = number, FORWARD, -1, False, False


class Plan:
    """The rules of one stage.

    Args:
        pipeline: "interleaved" prefers backward work; "simple" and "_only_forward" finish all forward work first.
        active: microbatches at work at once on the first stage; each later one holds one less.
    """

    def __init__(self, pipeline: str, active: int, stage: int) -> None:
        self.interleaved = pipeline == "interleaved"
        self.limit = max(1, active - stage)

    def may_run(self, progress: MicrobatchProgress, entries: list[MicrobatchProgress]) -> bool:
        """Return True if a microbatch can run its next piece now."""
        if progress.phase == DONE or progress.waiting:
            return False
        if not progress.started:
            if progress.number and not entries[progress.number - 1].started:
                return False
            return not self.interleaved or sum(each.started and each.phase != DONE for each in entries) < self.limit
        if progress.phase == BACKWARD:
            if not self.interleaved and any(each.phase == FORWARD for each in entries):
                return False
            # A segment follows the same one of the microbatch before: sums have one order.
            if progress.number:
                before = entries[progress.number - 1]
                if before.phase == FORWARD or (before.phase == BACKWARD and before.segment >= progress.segment):
                    return False
        return True

    def choose(self, entries: list[MicrobatchProgress]) -> MicrobatchProgress | None:
        """Return the microbatch to run next; None if all wait."""
        able = [progress for progress in entries if self.may_run(progress, entries)]
        return min(able, key=lambda progress: (progress.phase != BACKWARD, progress.number), default=None)


@dataclass
class Simulated:
    """Simulated plan: its length, the peak of live microbatches per stage, and (stage, microbatch, piece, from, to)."""

    length: float = 0.0
    peak: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int, str, float, float]] = field(default_factory=list)


def simulate(
    visits: list[int],
    microbatches: int,
    pipeline: str,
    active: int,
    forward: float = 1.0,
    backward: float = 2.0,
    shares: list[float] | None = None,
) -> Simulated:
    """Run a plan on stages that take ``forward`` and ``backward`` time for each visit.

    Args:
        visits: the stages that a microbatch passes, such as [0, 1, 2] or, in a loop, [0, 1, 2, 0].
        shares: fraction of these times per visit; default: 1.

    Raises RuntimeError if the plan deadlocks.
    """
    stages = max(visits) + 1
    plans = [Plan(pipeline, active, stage) for stage in range(stages)]
    entries = [[MicrobatchProgress(number) for number in range(microbatches)] for _ in range(stages)]
    own = [[index for index, stage in enumerate(visits) if stage == at] for at in range(stages)]
    # Position of each microbatch: completed visits forward and, counted from the end, backward.
    passed = [[0, 0] for _ in range(microbatches)]
    busy = [False] * stages
    found = Simulated(peak=[0] * stages)
    events: list[tuple[float, int, int, int]] = []
    now = 0.0

    def update(number: int) -> None:
        forwarded, back = passed[number]
        for stage in range(stages):
            progress = entries[stage][number]
            left = [index for index in own[stage] if index < len(visits) - back]
            if forwarded < len(visits) and any(index >= forwarded for index in own[stage]):
                progress.phase, progress.waiting = FORWARD, visits[forwarded] != stage
            elif left:
                # The segments of a stage are its visits.
                progress.phase, progress.segment = BACKWARD, len(left) - 1
                progress.waiting = forwarded < len(visits) or left[-1] != len(visits) - back - 1
            else:
                progress.phase = DONE

    for number in range(microbatches):
        update(number)
    while any(back < len(visits) for _, back in passed):
        for stage in range(stages):
            if busy[stage]:
                continue
            progress = plans[stage].choose(entries[stage])
            if progress is None:
                continue
            progress.started = busy[stage] = True
            live = sum(each.started and each.phase != DONE for each in entries[stage])
            found.peak[stage] = max(found.peak[stage], live)
            forwarded, back = passed[progress.number]
            visit = forwarded if progress.phase == FORWARD else len(visits) - 1 - back
            took = (forward if progress.phase == FORWARD else backward) * (shares[visit] if shares else 1.0)
            heapq.heappush(events, (now + took, stage, progress.number, progress.phase))
            found.pieces.append((stage, progress.number, "FB"[progress.phase], now, now + took))
        if not events:
            raise RuntimeError(f"the plan stands still at {now}: {passed}")
        now, stage, number, phase = heapq.heappop(events)
        busy[stage] = False
        passed[number][phase] += 1
        update(number)
        while events and events[0][0] == now:
            _, stage, number, phase = heapq.heappop(events)
            busy[stage] = False
            passed[number][phase] += 1
            update(number)
    found.length = now
    return found
