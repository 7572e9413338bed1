"""The handles of calls on CUDA tensors.

A call is over for the host before it is over for the device, for which only the current stream waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from smddp.torch import cuda
from smddp.torch.errors import CoreError, translate
from smddp.torch.retained_handles import last_look
from smddp.torch.work import NO_TIMEOUT, CoreWork, seconds


class DeviceWork(CoreWork):
    """One call of the core on tensors of one device.

    native: the core's handle, which keeps the memory until the device is through.
    outputs: what `result()` and the future give.
    after: what must be done once when the data is there (copies into strided outputs): enqueued by whoever waits first,
    on that stream, or by the core's helper thread when nobody waits; every other waiter's stream waits for it.
    touched: the tensors that `after` uses. ranks: as in errors.translate.
    """

    def __init__(
        self,
        native: Any,
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

    @last_look
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """The current stream waits for the call's end; the host does not.

        With a `timeout` the host waits, too, and CollectiveTimeoutError is raised after it. Raises the call's error if
        it has failed already; a later failure is raised by the next call on the group.
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
        """The data is there for what is enqueued on the current stream from now on."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether the device is through, the copies into strided outputs included."""
        if not self._native.is_done():
            return False
        if self._lock is None or self._native.error() is not None:
            return True
        self._finish_alone()
        return self._copied.query()

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
            # The stream of this waiter need not be the one that the memory was made on.
            for tensor in self._touched:
                cuda.record(tensor, stream)
            self._copied = cuda.mark(self._device)
            self._after = self._touched = ()

    def _finish_alone(self) -> None:
        # Also the core's callback. A failed call has nothing to bring home: its error is for the waiter.
        if self._lock is None or self._native.error() is not None:
            return
        with self._lock:
            if self._copied is None:
                with cuda.on_side(self._device):
                    self._finish()


class CudaWork(DeviceWork):
    """One that the current stream waits for; the host at most until the other ranks have made the call, too."""

    def _reach(self) -> None:
        self._native.wait_stream(cuda.stream_of(self._device))

    def _drive(self) -> None:
        try:
            self._reach()
        except CoreError:
            pass  # the future raises it

    def _when_done(self, callback: Callable[[], None]) -> None:
        # The value of a future is for streams, and these wait by themselves. torch's own backend does the same; what
        # waits for futures (the DDP reducer, hooks) counts on it to run ahead of the device.
        if self._native.is_enqueued():
            callback()
        elif not self._native.on_enqueued(callback):
            self._drive()
            callback()


class StagedWork(DeviceWork):
    """A message between hosts that stands for one between devices, by pinned memory: the host waits for it."""

    def _reach(self) -> None:
        self._native.wait(None)
