"""Ctrl-C during a step: TensorFlow holds the main thread, so Python's handler runs only after the step.

Python writes a signal's number to a descriptor at once. A thread reads it and aborts the group's calls if the handler
does not run; the step then fails and KeyboardInterrupt follows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from smddp._native import core

_POLL = 0.02

_writes: int | None = None
_before: Any = (-1, None)
_handled = threading.Event()
#: Set once a step was aborted for the signal whose handler runs next.
_ended = threading.Event()


def _after_fork() -> None:
    """Another thread may have held an event's lock at the fork, and the child inherits the handler."""
    global _handled, _ended
    _handled, _ended = threading.Event(), threading.Event()


os.register_at_fork(after_in_child=_after_fork)


def watch(abort: Callable[[str], None]) -> None:
    """Installs the handler in the main thread if SIGINT has a Python handler; else steps wait to their deadline."""
    global _writes, _before
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return
    reads, _writes = os.pipe()
    os.set_blocking(_writes, False)
    _before = signal.set_wakeup_fd(_writes, warn_on_full_buffer=False), handler
    signal.signal(signal.SIGINT, _handle)
    threading.Thread(target=_follow, args=(reads, _before[0], abort), name="smddp-signals", daemon=True).start()


def unwatch() -> None:
    """Restores the wakeup descriptor and the handler, unless other code has replaced them."""
    global _writes
    if _writes is None:
        return
    descriptor, handler = _before
    with contextlib.suppress(ValueError):  # outside of the main thread
        if signal.getsignal(signal.SIGINT) is _handle:
            signal.signal(signal.SIGINT, handler)
        if (now := signal.set_wakeup_fd(descriptor)) not in (-1, _writes):
            signal.set_wakeup_fd(now)
        os.close(_writes)
    _writes = None


def _handle(number: int, frame: FrameType | None) -> Any:
    _handled.set()
    if not _ended.is_set():
        return _before[1](number, frame)
    _ended.clear()
    # It runs while TensorFlow creates the exception of the aborted step, where a second exception would be lost. So it
    # waits until the caller of the step resumes.
    while frame is not None and frame.f_back is not None and _is_of_tensorflow(frame):
        frame = frame.f_back
    assert frame is not None
    tracing = sys.gettrace()

    def deliver(there: FrameType, event: str, value: Any) -> Any:
        there.f_trace = None
        sys.settrace(tracing)
        return _before[1](number, there)

    sys.settrace(lambda frame, event, value: None)
    frame.f_trace = deliver
    return None


def _is_of_tensorflow(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in ("tensorflow", "keras", "tf_keras", "smddp")


def _follow(reads: int, before: int, abort: Callable[[str], None]) -> None:
    while numbers := os.read(reads, 64):
        if before >= 0:
            with contextlib.suppress(OSError):
                os.write(before, numbers)
        if signal.SIGINT not in numbers:
            continue
        while not _handled.wait(_POLL):
            if core().tensorflow_is_pending():
                _ended.set()
                abort("a step was interrupted (Ctrl-C)")
                break
        _handled.clear()
    os.close(reads)
