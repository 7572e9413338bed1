"""Stack frames of the main thread for status queries.

faulthandler writes them on a signal without the interpreter's lock, and the core's service thread reads them. An
installed signal handler is never replaced.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import sysconfig
from pathlib import Path

from smddp._native import core
from smddp.observability import machine

_pid: int | None = None
_signal: int | None = None
# Write end of faulthandler's pipe, open as long as the handler is installed.
_writes: int | None = None


def offer() -> None:
    """Lets the core read the main thread's frames. Idempotent; no effect if SMDDP_STACKS=0 or no signal is free."""
    global _pid, _signal, _writes
    if _pid == os.getpid() or not core().are_stacks_enabled():
        return
    # After a fork the inherited handler writes to the parent's pipe.
    number = _signal or _free_signal()
    if number is None:
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    faulthandler.register(number, file=writes, all_threads=False, chain=False)
    _pid, _signal, _writes = os.getpid(), number, writes
    core().set_frame_source(number, reads, own_folders(), _package_folders())


def _free_signal() -> int | None:
    """Returns a real-time signal without a handler in C or Python, or None if /proc does not list handlers."""
    status = machine.read("/proc/self/status")
    if not status:
        return None
    handled = 0
    for line in status.splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn", "SigBlk"):
            handled |= int(mask, 16)
    for number in range(int(signal.SIGRTMAX) - 4, int(signal.SIGRTMIN) + 4, -1):
        if not handled >> (number - 1) & 1:
            return number
    return None


def _package_folders() -> list[str]:
    """Returns path prefixes of the standard library and of installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return sorted({f"{path}{os.sep}" for name in names if (path := sysconfig.get_paths().get(name))})


def own_folders() -> list[str]:
    """Returns path prefixes of files of smddp, torch and the interpreter."""
    torch = sys.modules.get("torch")
    package = str(Path(__file__).parent)
    files = [package, *([torch.__file__] if torch is not None and torch.__file__ else [])]
    return [f"{Path(file).parent}{os.sep}" for file in files] + ["<frozen "]
