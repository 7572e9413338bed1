"""Messages of a rank to itself, which torch allows for isend and irecv.

Nothing leaves the process, so the core has no part in it: a send leaves a copy, a receive takes it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from smddp.torch.arguments import CopyBack
from smddp.torch.errors import ClosedError, CollectiveTimeoutError, MismatchError


class Received:
    """A receive from the own rank; looks like the core's handle (smddp._core.Work).

    withdraw: takes it out of its mailbox; returns False where a message for it is already there.
    """

    def __init__(self, buffer: Tensor, rank: int, deadline: float, withdraw: Callable[[Received], bool]) -> None:
        self._buffer = buffer
        self._withdraw = withdraw
        self._rank = rank
        self._deadline = deadline
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.RLock()  # a signal handler may call in between

    def end(self, message: Tensor | None, error: BaseException | None = None) -> None:
        if message is not None:
            if message.numel() != self._buffer.numel() or message.dtype != self._buffer.dtype:
                error = MismatchError(
                    f"rank {self._rank} sent itself {message.numel()} elements of {message.dtype} and receives "
                    f"{self._buffer.numel()} of {self._buffer.dtype}"
                )
            else:
                try:
                    CopyBack(self._buffer, message.view(self._buffer.shape))()
                except Exception as failed:  # the receiver's error; the sender's call is right
                    error = failed
        self._error = error
        with self._lock:
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def wait(self, timeout: float | None = None) -> None:
        limit = max(self._deadline - time.monotonic(), 0.0) if timeout is None else timeout
        if not self._done.wait(limit):
            self.expire(limit)
            self._done.wait()
        if self._error is not None:
            raise self._error

    def expire(self, limit: float) -> None:
        """Ends a receive whose time is up, so that the next message is not its. limit: seconds that it had."""
        if self._withdraw(self):
            text = f"recv: Timed out after {limit:g} s: rank {self._rank} has sent nothing to itself with this tag"
            self.end(None, CollectiveTimeoutError(text))

    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def is_done(self) -> bool:
        if not self._done.is_set() and self.is_late():
            self.expire(0.0)
        return self._done.is_set()

    def error(self) -> BaseException | None:
        return self._error

    def source(self) -> int:
        return self._rank if self._done.is_set() else -1

    def on_done(self, callback: Callable[[], object]) -> bool:
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return True
        callback()
        return True


class Mailbox:
    """One rank's messages to itself: first in, first out for each tag."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.RLock()  # a signal handler may call in between
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)
        self._wanted: dict[int, deque[Received]] = defaultdict(deque)
        self._closed = False

    def send(self, source: Tensor, tag: int) -> None:
        """Never waits: the message is copied."""
        message = source.detach().flatten().clone()
        with self._lock:
            self._check_open()
            wanted = self._wanted[tag]
            late = [wanted.popleft() for _ in range(len(wanted)) if wanted[0].is_late()]
            receiver = wanted.popleft() if wanted else None
            if receiver is None:
                self._sent[tag].append(message)
        for each in late:
            each.end(None, CollectiveTimeoutError("recv: the deadline passed before this rank sent itself a message"))
        if receiver is not None:
            receiver.end(message)

    def receive(self, buffer: Tensor, tag: int, timeout: float) -> Received:
        receiver = Received(buffer, self._rank, time.monotonic() + timeout, functools.partial(self._withdraw, tag))
        with self._lock:
            self._check_open()
            message = self._sent[tag].popleft() if self._sent[tag] else None
            if message is None:
                self._wanted[tag].append(receiver)
        if message is not None:
            receiver.end(message)
        return receiver

    def _withdraw(self, tag: int, receiver: Received) -> bool:
        with self._lock:
            waits = receiver in self._wanted[tag]
            if waits:
                self._wanted[tag].remove(receiver)
        return waits

    def close(self) -> None:
        """Receives that wait raise, and so do later calls."""
        with self._lock:
            self._closed = True
            waiting = [receiver for receivers in self._wanted.values() for receiver in receivers]
            self._wanted.clear()
            self._sent.clear()
        for receiver in waiting:
            receiver.end(None, ClosedError("the group was closed while this receive from the own rank waited"))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this group was destroyed or aborted")
