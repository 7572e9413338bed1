"""Time estimates for `torch.distributed._time_estimator`.

Between `_start_time_estimate` and `_end_time_estimate` a group's calls send no data and return immediately; the cost
model adds their expected time. Experimental: torch's name is private. torch calls these methods of a backend, so they
are part of the group.
"""

from __future__ import annotations

from typing import Any

from smddp.torch.per_thread import PerThread
from smddp.torch.profiling import buffer_bytes


class Estimate:
    """Expected time of the calls of one thread on one group."""

    def __init__(self, comm: Any, size: int) -> None:
        self._comm = comm
        self._size = size
        self._known: dict[tuple[int, int, int, int], float] = {}
        self.seconds = 0.0

    def collective(self, call: Any) -> None:
        """Adds a collective. call: a `collectives.base.Call`."""
        asked = call.number, call.code, buffer_bytes(call, self._size), call.root
        if asked not in self._known:
            self._known[asked] = self._comm.estimate(*asked)
        self.seconds += self._known[asked]

    def message(self, peer: int, nbytes: int) -> None:
        """Adds a sent or received message. peer: rank, or -1 for any source."""
        self.seconds += self._comm.estimate_message(peer, nbytes)


class Estimating(PerThread):
    """The part of a group that implements torch's time estimates."""

    _comm: Any
    _size: int

    def _start_time_estimate(self) -> None:
        """Starts an estimate of this thread's calls. Replaces an estimate that an exception left open."""
        self._estimate = Estimate(self._comm, self._size)

    def _end_time_estimate(self) -> float:
        """Returns the total microseconds of the calls since the start. Raises RuntimeError without a start."""
        estimate, self._estimate = self._estimate, None
        if estimate is None:
            raise RuntimeError(
                "smddp: no time estimate of this thread on this group: not started, or ended by an exception in a call"
            )
        return float(estimate.seconds * 1e6)
