"""Handles of pending calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from smddp.torch.errors import CoreError, translate

NO_TIMEOUT = timedelta(0)

# Set while a thread runs users' callbacks of futures.
_callbacks = threading.local()


def seconds(timeout: timedelta | None) -> float | None:
    return timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else None


class Handle(Work):
    """Base of all handles: futures, and the methods of torch's Work that have no meaning on a CPU."""

    # The CUDA devices whose streams have to wait for the results.
    devices: tuple[int, ...] = ()

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """Waits: results on a CPU exist only when the call is done."""
        self.wait()

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() may only be called on the handle of a receive")

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the outputs, which raises the call's error.

        `Future.set_exception` would store the exception as a value that C++ interprets as tensors. An exception in a
        `then` callback is an error on both sides, hence two futures. With CUDA devices torch runs the callback on
        separate streams: these wait for the call, and the streams of the reader wait for them.
        """
        base: Future[None] = Future() if not self.devices else _cuda_future(self.devices)
        future = base.then(lambda _: self._value())
        if getattr(_callbacks, "running", False):
            # A callback of another future may wait for this one on the thread that would complete it.
            # This thread therefore completes the call first.
            self._drive()
        self._when_done(lambda: _run_callbacks(base))
        return future

    def _value(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def _drive(self) -> None:
        raise NotImplementedError

    def _when_done(self, callback: Callable[[], None]) -> None:
        """Runs the callback once, when `wait` no longer blocks the host."""
        raise NotImplementedError


def _cuda_future(devices: tuple[int, ...]) -> Future[None]:
    from smddp.torch import cuda

    return cuda.future(devices)


def _run_callbacks(base: Future[None]) -> None:
    before = getattr(_callbacks, "running", False)
    _callbacks.running = True
    try:
        base.set_result(None)
    finally:
        _callbacks.running = before


class DoneWork(Handle):
    """A call that was finished before it returned."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def _drive(self) -> None:
        pass

    def _when_done(self, callback: Callable[[], None]) -> None:
        callback()


class NativeWork(Protocol):
    """The core's handle (smddp._core.Work), or that of a message of a rank to itself (loopback.Received)."""

    def wait(self, timeout: float | None = None) -> None: ...
    def is_done(self) -> bool: ...
    def error(self) -> BaseException | None: ...
    def source(self) -> int: ...
    def on_done(self, callback: Callable[[], object]) -> bool: ...


class CoreWork(Handle):
    """Base of the handles of the core's calls: waiting and completion on the host."""

    # The core's handle, which keeps the memory alive until the call is done.
    _native: NativeWork
    # As in errors.translate.
    _ranks: Sequence[int] | None

    def is_success(self) -> bool:
        return self.is_completed() and self._native.error() is None

    def exception(self) -> BaseException | None:
        error = self._native.error()
        return None if error is None else translate(error, self._ranks)

    def source_rank(self) -> int:
        """Returns the group rank of the sender of a received message."""
        return self._native.source()

    _source_rank = source_rank

    def _drive(self) -> None:
        try:
            self._native.wait(None)
        except CoreError:
            pass  # the future raises it

    def _when_done(self, callback: Callable[[], None]) -> None:
        # The core's helper thread runs one callback at a time, and this may be one of them.
        if self._native.is_done():
            callback()
        elif not self._native.on_done(callback):
            self._drive()
            callback()


class SmddpWork(CoreWork):
    """One call of the core on host memory.

    native: the core's handle.
    outputs: the value of `result()` and of the future.
    after: steps that run once after the data arrived (copies into strided outputs). They run in the first wait, poll or
    future that finds the call complete, else on the core's helper thread.
    ranks: as in errors.translate.
    """

    def __init__(
        self,
        native: NativeWork,
        outputs: list[Tensor],
        after: Sequence[Callable[[], None]],
        ranks: Sequence[int] | None,
    ) -> None:
        super().__init__(outputs)
        self._native = native
        self._after = after
        self._ranks = ranks
        self._lock = threading.RLock() if after else None
        if after:
            native.on_done(self._finish_quietly)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drives the call to completion. Raises its error, or CollectiveTimeoutError after `timeout`."""
        try:
            self._native.wait(seconds(timeout))
        except CoreError as error:
            raise translate(error, self._ranks) from None
        if self._lock is not None:
            self._finish()
        return True

    def is_completed(self) -> bool:
        if not self._native.is_done():
            return False
        self._finish_quietly()
        return True

    def _finish(self) -> None:
        # A second thread must not return before the first has finished, so `_after` is read under the lock only.
        assert self._lock is not None
        with self._lock:
            steps, self._after = self._after, ()
            for step in steps:
                step()

    def _finish_quietly(self) -> None:
        # Also the core's callback. A failed call has no results to copy; `wait` raises its error.
        if self._lock is not None and self._native.error() is None:
            self._finish()


class JoinedWork(Handle):
    """One handle for several calls: a coalesced call, or a coalescing block."""

    def __init__(self, works: Sequence[Any], outputs: list[Tensor]) -> None:
        super().__init__(outputs)
        self._works = works
        self.devices = tuple(sorted({device for work in works for device in work.devices}))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits for all calls. Raises the first error."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def _drive(self) -> None:
        for work in self._works:
            work._drive()

    def _when_done(self, callback: Callable[[], None]) -> None:
        left = len(self._works)
        if not left:
            callback()
            return
        lock = threading.Lock()

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                callback()

        for work in self._works:
            work._when_done(one_less)


def join(works: Sequence[Any], outputs: list[Tensor] | None = None) -> Work:
    """Returns one handle for several calls."""
    if len(works) == 1 and outputs is None:
        single: Work = works[0]
        return single
    if outputs is None:
        outputs = [tensor for work in works for tensor in work.result()]
    return JoinedWork(works, outputs)
