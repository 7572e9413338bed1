"""The end of a process in which a thread still waits for a store that has fallen silent.

The core leaves such a thread behind (`Comm.make`); it is in torch's client, and goes on when the store answers
after all. If that is first when the interpreter is taken down, the client's way back into it aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable

# Of a thread whose connection is gone.
_SECONDS = 1.0
# Descriptors that are tried where /proc does not list them.
_MOST_DESCRIPTORS = 4096


def leave_behind(port: int | None, ended: Callable[[], bool]) -> None:
    """At the process's end its connections to that port, the store's, are shut, and `ended` is awaited for a second."""
    atexit.register(_end, port, ended)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # /proc is not mounted
        return list(range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MOST_DESCRIPTORS)))


def _end(port: int | None, ended: Callable[[], bool]) -> None:
    if ended():
        return
    for fd in _descriptors():
        # What is no connection any more, or never was.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + _SECONDS
    while not ended() and time.monotonic() < until:
        time.sleep(0.01)
