"""Straggler detection from the ranks' dumps. Needs neither torch nor the core.

The lateness of an operation is the time between the last two submissions of its ranks, which the last rank costs.
The ends of operations align the hosts' clocks, because collectives end on all ranks at about the same time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

# Operations that end on no rank before all ranks have submitted them.
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
_NEWEST = 500
_FEWEST = 20
# Lateness below this value is attributed to scheduling noise.
_NOISE_NS = 10_000_000
# Minimum share of late operations for one rank, and their minimum cost as a share of the elapsed time.
_SHARE, _COST = 0.7, 0.03


@dataclass(frozen=True)
class Last:
    """Last rank of one operation: its lateness after the next rank, and the operation's end."""

    seq: int
    rank: int
    late_ns: float
    ended_ns: float


@dataclass(frozen=True)
class Straggler:
    group: str
    rank: int
    share: float
    operations: int
    late_ns: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was last in {self.share:.0%} of the last {self.operations} operations of group "
            f"`{self.group}`, median {self.late_ns / 1e6:.0f} ms late"
        )


def lasts(dumps: Sequence[dict[str, Any]]) -> dict[tuple[str, int], list[Last]]:
    """Returns the last rank of each operation that all dumps of a group contain, by the group's name and size.

    The dumps must be of one job. A group with a duplicate rank belongs to two jobs and is left out.
    """
    groups: dict[tuple[str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for dump in dumps:
        for group in dump["groups"]:
            groups.setdefault((group["name"], group["size"]), []).append((dump, group))
    return {
        which: _of_group(members)
        for which, members in groups.items()
        if 1 < len(members) == len({group["rank"] for _, group in members})
    }


def _of_group(members: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Last]:
    tables = [{op["seq"]: op for op in group["operations"] if _counts(op)} for _, group in members]
    seqs = sorted(set(tables[0]).intersection(*tables[1:]))
    ahead = _clocks([dump["host"] for dump, _ in members], tables, seqs)
    names = [group["rank"] if dump["rank"] is None else dump["rank"] for dump, group in members]
    whole = len(members) == members[0][1]["size"]
    found = []
    for seq in seqs:
        ops = [table[seq] for table in tables]
        times = [op["submitted_ns"] - offset for op, offset in zip(ops, ahead)]
        place = max(range(len(times)), key=times.__getitem__)
        late = times[place] - max(times[:place] + times[place + 1 :])
        # The last known rank waits for ranks without a dump.
        if not whole and ops[place]["ended_ns"] - ops[place]["submitted_ns"] > late:
            late = 0.0
        found.append(Last(seq, names[place], late, ops[place]["ended_ns"] - ahead[place]))
    return found


def _counts(op: dict[str, Any]) -> bool:
    return op["outcome"] == "ok" and op["what"].partition(" ")[0] in _TOGETHER


def _clocks(hosts: Sequence[str], tables: Sequence[dict[int, Any]], seqs: Sequence[int]) -> list[float]:
    """Returns the offset of each host's clock to the first host's, in ns."""
    ends: dict[str, list[int]] = {
        host: [min(table[seq]["ended_ns"] for at, table in zip(hosts, tables) if at == host) for seq in seqs]
        for host in set(hosts)
    }
    first = ends[hosts[0]]
    offsets = {
        host: median(end - begin for end, begin in zip(found, first)) if seqs and host != hosts[0] else 0.0
        for host, found in ends.items()
    }
    return [offsets[host] for host in hosts]


class Stragglers:
    """Detector that accumulates the newest operations of each group over several updates."""

    def __init__(self) -> None:
        self._lasts: dict[tuple[str, int], deque[Last]] = {}

    def update(self, dumps: Sequence[dict[str, Any]]) -> list[Straggler]:
        """Adds the dumps' operations and returns the current stragglers. Drops groups without a dump."""
        found = lasts(dumps)
        self._lasts = {which: self._lasts.get(which, deque(maxlen=_NEWEST)) for which in found}
        for which, new in found.items():
            kept = self._lasts[which]
            if kept and new and new[-1].seq < kept[-1].seq:
                kept.clear()  # another group of that name
            newest = kept[-1].seq if kept else -1
            kept.extend(last for last in new if last.seq > newest)
        return [one for (name, _), kept in self._lasts.items() if (one := _straggler(name, list(kept)))]


def find(dumps: Sequence[dict[str, Any]]) -> list[Straggler]:
    """Returns the stragglers in these dumps."""
    return Stragglers().update(dumps)


def _straggler(group: str, kept: Sequence[Last]) -> Straggler | None:
    late = [last for last in kept if last.late_ns >= _NOISE_NS]
    if len(late) < _FEWEST:
        return None
    (rank, count), *_ = Counter(last.rank for last in late).most_common(1)
    own = [last.late_ns for last in late if last.rank == rank]
    # Two ranks that are late by chance seldom differ by three standard deviations.
    beyond_chance = count >= len(late) / 2 + 1.5 * math.sqrt(len(late))
    costs = sum(own) >= _COST * (kept[-1].ended_ns - kept[0].ended_ns)
    if not beyond_chance or count < _SHARE * len(late) or not costs:
        return None
    return Straggler(group, rank, count / len(kept), len(kept), median(own))
