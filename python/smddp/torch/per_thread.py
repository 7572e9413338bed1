"""Thread-local state of a group: the open coalescing block and the time estimate."""

from __future__ import annotations

import threading
from typing import Any


class _State(threading.local):
    """Values of the calling thread."""

    # Handles of the calls that were started in the open coalescing block.
    batch: list[Any] | None = None
    # A `time_estimate.Estimate`, or the call recorder of `bound_calls`.
    estimate: Any = None


class PerThread:
    """The part of a group with thread-local state, created by the first coalescing block or estimate."""

    # None until the first thread sets a value.
    _states: _State | None = None

    def _of_thread(self) -> _State:
        found: _State = self.__dict__.setdefault("_states", _State())  # atomic between threads
        return found

    def _has_thread_state(self) -> bool:
        """Returns whether this thread has a block or an estimate open."""
        states = self._states
        return states is not None and (states.batch is not None or states.estimate is not None)

    def _forget_threads(self) -> None:
        """Drops the state of all threads."""
        self.__dict__.pop("_states", None)

    @property
    def _batch(self) -> list[Any] | None:
        return None if self._states is None else self._states.batch

    @_batch.setter
    def _batch(self, batch: list[Any] | None) -> None:
        if batch is not None or self._states is not None:
            self._of_thread().batch = batch

    @property
    def _estimate(self) -> Any:
        return None if self._states is None else self._states.estimate

    @_estimate.setter
    def _estimate(self, estimate: Any) -> None:
        if estimate is not None or self._states is not None:
            self._of_thread().estimate = estimate
