"""State of a group that belongs to one thread: its open coalescing block and its time estimate."""

from __future__ import annotations

import threading
from typing import Any


class _State(threading.local):
    """Values of the calling thread."""

    # Handles of the calls that were started in the open coalescing block.
    batch: list[Any] | None = None
    # An `time_estimate.Estimate`, or what `bound_calls` puts in its place.
    estimate: Any = None


class PerThread:
    """The part of a group that keeps such state. A group that never opened a block or an estimate has none."""

    # None until the first thread sets a value.
    _states: _State | None = None

    def _of_thread(self) -> _State:
        found: _State = self.__dict__.setdefault("_states", _State())  # atomic, where two threads come first
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
