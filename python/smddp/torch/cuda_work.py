"""Handles of calls on CUDA tensors.

A call completes for the host before it completes on the device; only the current stream waits for the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from smddp.torch import cuda
from smddp.torch.errors import CoreError, translate
from smddp.torch.work import NO_TIMEOUT, CoreWork, seconds

if TYPE_CHECKING:
    from smddp import _core


class DeviceWork(CoreWork):
    """One call of the core on tensors of one device.

    native: the core's handle, which keeps the memory until the device has finished.
    outputs: the value of `result()` and of the future.
    after: steps that run once after the data arrived (copies into strided outputs). The first waiter enqueues them on
    its stream, else the core's helper thread does; the streams of later waiters wait for them.
    touched: the tensors that `after` uses. ranks: as in errors.translate.
    """

    _native: _core.Work

    def __init__(
        self,
        native: _core.Work,
        device: int,
        outputs: list[Tensor],
        after: Sequence[Callable[[], None]],
        touched: Sequence[Tensor],
        ranks: Sequence[int] | None,
    ) -> None:
        super().__init__(outputs)
        self.devices = (device,)
        self._native = native
        self._device = device
        self._after = after
        self._touched = touched
        self._ranks = ranks
        self._copied: Any = None
        self._lock = threading.RLock() if after else None
        if after:
            native.on_done(self._finish_alone)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Makes the current stream, not the host, wait for the call.

        With a `timeout` the host waits as well, and CollectiveTimeoutError is raised after it. Raises the error of a
        failed call; a later failure is raised by the next call on the group.
        """
        if cuda.capturing(self._device):
            raise RuntimeError(
                "smddp: a call that was started outside cannot be waited for while the current stream is captured into "
                "a CUDA graph; wait before the capture begins"
            )
        limit = seconds(timeout)
        try:
            if limit is not None:
                self._native.wait(limit)
            self._reach()
        except CoreError as error:
            raise translate(error, self._ranks) from None
        self._finish()
        return True

    def _reach(self) -> None:
        """Orders later work on the current stream after the arrival of the data."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Returns whether the device has finished, including the copies into strided outputs."""
        if not self._native.is_done():
            return False
        if self._lock is None or self._native.error() is not None:
            return True
        self._finish_alone()
        return bool(self._copied.query())

    def _finish(self) -> None:
        if self._lock is None:
            return
        with self._lock:
            if self._copied is not None:
                cuda.wait_for(self._copied, self._device)
                return
            stream = cuda.current(self._device)
            for step in self._after:
                step()
            # The waiter's stream may differ from the stream that allocated the memory.
            for tensor in self._touched:
                cuda.record(tensor, stream)
            self._copied = cuda.mark(self._device)
            self._after = self._touched = ()

    def _finish_alone(self) -> None:
        # Also the core's callback. A failed call has no results to copy; `wait` raises its error.
        if self._lock is None or self._native.error() is not None:
            return
        with self._lock:
            if self._copied is None:
                with cuda.on_side(self._device):
                    self._finish()


class CudaWork(DeviceWork):
    """A collective. The current stream waits for it; the host waits at most until all ranks have made the call."""

    def _reach(self) -> None:
        self._native.wait_stream(cuda.stream_of(self._device))

    def _drive(self) -> None:
        try:
            self._reach()
        except CoreError:
            pass  # the future raises it

    def _when_done(self, callback: Callable[[], None]) -> None:
        # Complete as soon as the call is enqueued, as in torch's own backend: streams wait for the value, and waiters
        # of futures (DDP reducer, hooks) run ahead of the device.
        if self._native.is_enqueued():
            callback()
        elif not self._native.on_enqueued(callback):
            self._drive()
            callback()


class StagedWork(DeviceWork):
    """A message between devices that is staged in pinned host memory. The host waits for it."""

    def _reach(self) -> None:
        self._native.wait(None)
