"""Exit of a process while a thread still waits for a store that does not answer.

The core abandons such a thread (`Comm.make`) in torch's client. If the store answers during interpreter shutdown, the
client's return into Python aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable

# Seconds for the thread to end after its connection is shut down.
_SECONDS = 1.0
# Maximum number of descriptors to try if /proc does not list them.
_MOST_DESCRIPTORS = 4096


def leave_behind(port: int | None, ended: Callable[[], bool]) -> None:
    """At exit, shuts down the connections to the store's port and waits up to 1 s for `ended`."""
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
        # The descriptor may be closed, or not a socket.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family != socket.AF_UNIX and connection.getpeername()[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + _SECONDS
    while not ended() and time.monotonic() < until:
        time.sleep(0.01)
