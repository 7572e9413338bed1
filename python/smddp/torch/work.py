"""The handles of calls under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from smddp.torch import retained_handles
from smddp.torch.errors import CoreError, translate
from smddp.torch.retained_handles import last_look

NO_TIMEOUT = timedelta(0)

# Set on a thread while it runs users' callbacks of futures.
_callbacks = threading.local()


def seconds(timeout: timedelta | None) -> float | None:
    return timeout.total_seconds() if timeout is not None and timeout > NO_TIMEOUT else None


class Handle(Work):
    """What all handles share: futures, and the parts of torch's Work that mean nothing on a CPU."""

    # The CUDA devices whose streams have to wait for the results.
    devices: tuple[int, ...] = ()

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        if retained_handles.NEEDED:
            retained_handles.keep(self)

    def drop_tensors(self) -> None:
        """Called for a handle that is over and that nobody in Python has: only C++ may still wait for it."""
        self._outputs = []

    def is_over(self) -> bool:
        """Whether the call has ended, well or not. Does nothing else."""
        raise NotImplementedError

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """Results on a CPU are there only when the call is done, so this waits."""
        self.wait()

    def source_rank(self) -> int:
        raise RuntimeError("source_rank() may only be called on the handle of a receive")

    _source_rank = source_rank

    @last_look
    def get_future(self) -> Future[list[Tensor]]:
        """A future of the outputs, which raises the call's own error.

        `Future.set_exception` would store the exception as an ordinary value that C++ takes for tensors.
        An exception out of a `then` callback is a real error on both sides, hence the two futures. Where CUDA devices
        take part, torch runs the callback on streams of its own: these wait for the call, and whoever takes the value
        has its streams wait for them.
        """
        base: Future[None] = Future() if not self.devices else _cuda_future(self.devices)
        future = base.then(lambda _: self._value())
        if getattr(_callbacks, "running", False):
            # A callback of another future asks for this one, and may wait for it on the very thread that
            # would complete it. So the call is finished first, here: who waits, drives.
            self._drive()
        self._when_done(lambda: _run_callbacks(base))
        return future

    def _value(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def _drive(self) -> None:
        raise NotImplementedError

    def _when_done(self, callback: Callable[[], None]) -> None:
        """Call back once when a wait does not keep the host any more."""
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

    @last_look
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    is_over = is_completed

    def exception(self) -> None:
        return None

    def _drive(self) -> None:
        pass

    def _when_done(self, callback: Callable[[], None]) -> None:
        callback()


class CoreWork(Handle):
    """What the handles of calls of the core share: the host waits for one and hears of its end."""

    # The core's handle, which keeps the memory alive until the call is done.
    _native: Any
    # As in errors.translate.
    _ranks: Sequence[int] | None

    def is_over(self) -> bool:
        return self._native.is_done()

    def is_success(self) -> bool:
        return self.is_completed() and self._native.error() is None

    def exception(self) -> BaseException | None:
        error = self._native.error()
        return None if error is None else translate(error, self._ranks)

    def source_rank(self) -> int:
        """The group rank that a receive got its message from."""
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
    outputs: what `result()` and the future give.
    after: what must be done once when the data is there (copies into strided outputs); it is done by whoever
    sees the end first: a wait, a poll, a future, or the core's helper thread when nobody looks.
    ranks: as in errors.translate.
    """

    def __init__(
        self, native: Any, outputs: list[Tensor], after: Sequence[Callable[[], None]], ranks: Sequence[int] | None
    ) -> None:
        super().__init__(outputs)
        self._native = native
        self._after = after
        self._ranks = ranks
        self._lock = threading.RLock() if after else None
        if after:
            native.on_done(self._finish_quietly)

    @last_look
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Drive the call to its end. Raises its error, or CollectiveTimeoutError after `timeout`."""
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
        # Whoever comes second must not pass before the first is through, hence no look without the lock.
        assert self._lock is not None
        with self._lock:
            steps, self._after = self._after, ()
            for step in steps:
                step()

    def _finish_quietly(self) -> None:
        # Also the core's callback: a failed call has nothing to bring home, its error is for the waiter.
        if self._lock is not None and self._native.error() is None:
            self._finish()


class JoinedWork(Handle):
    """Several calls behind one handle: a coalesced call, or a coalescing block."""

    def __init__(self, works: Sequence[Any], outputs: list[Tensor]) -> None:
        super().__init__(outputs)
        self._works = works
        self.devices = tuple(sorted({device for work in works for device in work.devices}))

    @last_look
    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all; raises the first error."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_over(self) -> bool:
        return all(work.is_over() for work in self._works)

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
    """One handle for several calls."""
    if len(works) == 1 and outputs is None:
        return works[0]
    if outputs is None:
        outputs = [tensor for work in works for tensor in work.result()]
    return JoinedWork(works, outputs)
