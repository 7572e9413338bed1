"""The end of a process in which a thread still waits for a store that has fallen silent.

The core leaves such a thread behind (`Comm.make`); it is in torch's client, and goes on when the store answers
after all. If that is first when the interpreter is taken down, the client's way back into it aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable

# Of a thread whose connection is gone.
_SECONDS = 1.0


def leave_behind(port: int | None, ended: Callable[[], bool]) -> None:
    """At the process's end its connections to that port, the store's, are shut, and `ended` is awaited for a second."""
    atexit.register(_end, port, ended)


def _end(port: int | None, ended: Callable[[], bool]) -> None:
    if ended():
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        # What is no connection any more, or never was.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + _SECONDS
    while not ended() and time.monotonic() < until:
        time.sleep(0.01)
