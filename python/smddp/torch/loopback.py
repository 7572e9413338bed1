"""Messages of a rank to itself, which torch allows for isend and irecv.

They bypass the core: a send stores a copy and a receive takes it. Deadlines work as between two ranks:
`wait(timeout)` ends the wait only, and the group's timeout ends the receive.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from torch import Tensor

from smddp.text import this_rank
from smddp.torch.arguments import CopyBack
from smddp.torch.errors import ClosedError, CollectiveTimeoutError, MismatchError


class Received:
    """A receive from the same rank, with the interface of the core's handle (smddp._core.Work).

    label: operation, number and group, for errors. timeout: seconds until its deadline. withdraw: removes it from its
    mailbox; returns False if its message has already arrived.
    """

    def __init__(
        self, buffer: Tensor, rank: int, label: str, timeout: float, withdraw: Callable[[Received], bool]
    ) -> None:
        self._buffer = buffer
        self._withdraw = withdraw
        self._me = this_rank(rank)
        self._rank = rank
        self._label = label
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._lock = threading.RLock()  # a signal handler may call in between

    def end(self, message: Tensor | None, error: BaseException | None = None) -> None:
        if message is not None:
            if message.numel() != self._buffer.numel() or message.dtype != self._buffer.dtype:
                error = MismatchError(
                    f"{self._label} does not match: {self._me} sent itself {message.numel()} elements of "
                    f"{message.dtype} and receives {self._buffer.numel()} elements of {self._buffer.dtype}; send and "
                    "receive the same number and type"
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
        left = max(self._deadline - time.monotonic(), 0.0)
        if not self._done.wait(left if timeout is None else min(left, timeout)):
            if not self.is_late():
                assert timeout is not None
                raise CollectiveTimeoutError(
                    f"wait for {self._label} Timed out waiting {timeout * 1000:.0f}ms: {self._me} has sent "
                    "nothing to itself with this tag; the call goes on; send the message, or wait again"
                )
            self.expire()
            self._done.wait()
        if self._error is not None:
            raise self._error

    def expire(self) -> None:
        """Ends a receive whose deadline has passed, so that it takes no later message."""
        if self._withdraw(self):
            self.end(None, self.late())

    def late(self) -> CollectiveTimeoutError:
        """Returns the error of a receive whose deadline has passed."""
        return CollectiveTimeoutError(
            f"{self._label} Timed out waiting {self._timeout * 1000:.0f}ms: {self._me} has sent nothing to "
            "itself with this tag; send before the deadline, or raise the group's timeout"
        )

    def closed(self) -> ClosedError:
        """Returns the error of a receive whose group has been closed."""
        return ClosedError(
            f"{self._label} failed: {self._me} destroyed or aborted the group while the call waited; wait for "
            "pending receives before destroy_process_group"
        )

    def is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def is_done(self) -> bool:
        if not self._done.is_set() and self.is_late():
            self.expire()
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
    """Messages of one rank to itself, in FIFO order per tag.

    rank, group: for errors.
    """

    def __init__(self, rank: int, group: str) -> None:
        self._rank = rank
        self._group = group
        self._receives = 0
        self._lock = threading.RLock()  # a signal handler may call in between
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)
        self._wanted: dict[int, deque[Received]] = defaultdict(deque)
        self._closed = False

    def send(self, source: Tensor, tag: int) -> None:
        """Copies the message; never blocks."""
        message = source.detach().flatten().clone()
        with self._lock:
            self._check_open()
            wanted = self._wanted[tag]
            late = [wanted.popleft() for _ in range(len(wanted)) if wanted[0].is_late()]
            receiver = wanted.popleft() if wanted else None
            if receiver is None:
                self._sent[tag].append(message)
        for each in late:
            each.end(None, each.late())
        if receiver is not None:
            receiver.end(message)

    def receive(self, buffer: Tensor, tag: int, timeout: float) -> Received:
        with self._lock:
            self._check_open()
            number, self._receives = self._receives, self._receives + 1
            label = f"recv #{number} from rank {self._rank}, this rank, with tag {tag} on group `{self._group}`"
            receiver = Received(buffer, self._rank, label, timeout, functools.partial(self._withdraw, tag))
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
        """Closes the mailbox: pending receives and later calls raise."""
        with self._lock:
            self._closed = True
            waiting = [receiver for receivers in self._wanted.values() for receiver in receivers]
            self._wanted.clear()
            self._sent.clear()
        for receiver in waiting:
            receiver.end(None, receiver.closed())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                f"group `{self._group}` is closed: {this_rank(self._rank)} destroyed or aborted it; "
                "create a new group to continue"
            )
