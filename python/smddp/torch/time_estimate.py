"""torch's time estimates: between `_start_time_estimate` and `_end_time_estimate` a group's calls move nothing, and are
answered at once by the cost model. A torch that has `torch.distributed._time_estimator` asks for them.
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
        """call: a `collectives.base.Call`."""
        asked = call.number, call.code, buffer_bytes(call, self._size), call.root
        if asked not in self._known:
            self._known[asked] = self._comm.estimate(*asked)
        self.seconds += self._known[asked]

    def message(self, peer: int, nbytes: int) -> None:
        """One that is sent or received; peer -1: from any rank."""
        self.seconds += self._comm.estimate_message(peer, nbytes)


class Estimating(PerThread):
    """The part of a group that torch asks for estimates."""

    _comm: Any
    _size: int

    def _start_time_estimate(self) -> None:
        """This thread's calls are estimated from now on; an estimate that an exception left open is forgotten."""
        self._estimate = Estimate(self._comm, self._size)

    def _end_time_estimate(self) -> float:
        """Microseconds of the calls since then, one after the other. Raises RuntimeError where nothing was begun."""
        estimate, self._estimate = self._estimate, None
        if estimate is None:
            raise RuntimeError(
                "smddp: this thread began no time estimate on this group, or a call in it raised and ended it"
            )
        return float(estimate.seconds * 1e6)
