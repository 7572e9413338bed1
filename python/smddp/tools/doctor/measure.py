"""Latency and bandwidth between pairs of ranks, by point-to-point messages of a group, in a few seconds.

The lower rank of a pair measures, one pair at a time within a node. Between nodes the first ranks measure, one pair per
node at a time. The best value counts, because other load only makes results worse.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

from smddp._native import core

Step = list[tuple[int, int]]

#: Name of the group of the present ranks.
GROUP = "doctor"
_BARRIER, _F32, _U8 = 8, 0, 8
_TAG = 0x646F63
_SMALLEST, _LARGEST = 64 << 10, 8 << 20
_SMALL = 8
# Seconds per pair: for many small messages, and the minimum for one large message, so that link buffers have little
# effect.
_LATENCY, _LONG = 0.008, 0.05
_ROUNDS = 200
# A node with more ranks measures only neighbours, and a job with more nodes only some pairs of each node.
_MOST_IN_A_NODE = 12
_MOST_NODES = 64


def steps(nodes: Sequence[int]) -> list[Step]:
    """Returns the steps; the pairs of one step are measured concurrently. nodes: the node of each rank."""
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    inner = [_within(ranks) for ranks in members.values()]
    longest = max(map(len, inner), default=0)
    together = [[pairs[at] for pairs in inner if at < len(pairs)] for at in range(longest)]
    return together + _between([ranks[0] for ranks in members.values()])


def _within(ranks: list[int]) -> Step:
    count = len(ranks)
    if count <= _MOST_IN_A_NODE:
        return [(a, b) for at, a in enumerate(ranks) for b in ranks[at + 1 :]]
    return sorted(
        {
            (min(a, b), max(a, b))
            for at, a in enumerate(ranks)
            for b in (ranks[(at + 1) % count], ranks[(at + count // 2) % count])
        }
    )


def _between(leaders: list[int]) -> list[Step]:
    """Pairs all leaders by the circle method of a round-robin tournament."""
    if len(leaders) < 2:
        return []
    places: list[int | None] = [*leaders, *([None] * (len(leaders) % 2))]
    rounds = []
    for _ in range(min(len(places) - 1, _MOST_NODES - 1)):
        met = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]))
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places[1:] = [places[-1], *places[1:-1]]
    return rounds


class Meter:
    """Measurements of one rank."""

    def __init__(self, comm: Any, deadline: float) -> None:
        """deadline: in time.monotonic(); no pair starts after it, and no message waits over 10 s longer."""
        self._comm = comm
        self._deadline = deadline
        self._large = ctypes.create_string_buffer(_LARGEST)
        self._header = (ctypes.c_int64 * 2)()

    def run(self, these: Sequence[Step], share: float = 1.0) -> list[dict[str, Any]]:
        """Returns the rows of this rank's pairs: {"ranks", "latency us", "GB/s"}. Collective call.

        share: fraction of the usual time per pair. Raises the errors of the group's messages and barriers.
        """
        rows = []
        for step in these:
            # A pair of the next step would compete for the processors of this step.
            self._comm.collective(_BARRIER, _F32, 0, 0.0, 0, None, None, None, self._patience(), False)
            for first, second in step:
                if self._comm.rank == first:
                    latency, bandwidth = self._measure(second, share)
                    if latency > 0:
                        rows.append({"ranks": [first, second], "latency us": latency * 1e6, "GB/s": bandwidth / 1e9})
                elif self._comm.rank == second:
                    self._follow(first)
        return rows

    def _patience(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0) + 10.0

    def _message(self, peer: int, buffer: Any, size: int, sends: bool) -> None:
        move = self._comm.send if sends else self._comm.recv
        move((ctypes.addressof(buffer), size), _U8, peer, _TAG, buffer, self._patience()).wait()

    def _order(self, peer: int, size: int, rounds: int) -> None:
        self._header[0], self._header[1] = size, rounds
        self._message(peer, self._header, 2 * _SMALL, True)

    def _times(self, peer: int, size: int, rounds: int) -> list[float]:
        self._order(peer, size, rounds)
        times = []
        for _ in range(rounds):
            begun = time.perf_counter()
            self._message(peer, self._large, size, True)
            self._message(peer, self._large, _SMALL, False)
            times.append(time.perf_counter() - begun)
        return times

    def _measure(self, peer: int, share: float) -> tuple[float, float]:
        """Returns the one-way latency of 8 bytes in seconds and the bandwidth in bytes/s; zeros if no time is left."""
        round_trip, bandwidth = 0.0, 0.0
        if time.monotonic() < self._deadline:
            # The first message establishes the connection.
            self._times(peer, _SMALL, 2)
            round_trip = min(self._times(peer, _SMALL, 3))
            rounds = int(_LATENCY * share / max(round_trip, 1e-7))
            if rounds > 0:
                round_trip = min(round_trip, *self._times(peer, _SMALL, min(rounds, _ROUNDS)))
            size = _SMALLEST
            while True:
                took = min(self._times(peer, size, 2))
                if size == _LARGEST or took >= _LONG * share or time.monotonic() >= self._deadline:
                    break
                size = min(size * 4, _LARGEST)
            # The 8-byte reply's latency is not part of the message's time.
            bandwidth = size / max(took - round_trip / 2, took / 2)
        self._order(peer, 0, 0)
        return round_trip / 2, bandwidth

    def _follow(self, peer: int) -> None:
        while True:
            self._message(peer, self._header, 2 * _SMALL, False)
            size, rounds = self._header[0], self._header[1]
            if rounds == 0:
                return
            for _ in range(rounds):
                self._message(peer, self._large, size, False)
                self._message(peer, self._large, _SMALL, True)


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one row per pair: its lowest latency and its highest bandwidth."""
    found: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in rows:
        known = found.setdefault(tuple(row["ranks"]), dict(row))
        known["latency us"] = min(known["latency us"], row["latency us"])
        known["GB/s"] = max(known["GB/s"], row["GB/s"])
    return list(found.values())


def make(store: Any, rank: int, size: int, seconds: float) -> Any:
    """Creates the group of the present ranks."""
    return core().Comm.make(store, "create_group", GROUP, rank, size, seconds)
