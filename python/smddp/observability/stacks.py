"""The main thread's line for whoever asks this process what it does: faulthandler writes it on a signal, without the
interpreter's lock, and the core's service thread reads it. A handler that somebody installed is never replaced.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from smddp._native import core
from smddp.observability import machine

_pid: int | None = None
_signal: int | None = None
# The end that faulthandler writes to. It must stay open as long as the handler is there.
_writes: int | None = None


def offer() -> None:
    """Let the core find out where the main thread is. Idempotent; nothing where SMDDP_STACKS=0 or no signal is free."""
    global _pid, _signal, _writes
    if _pid == os.getpid() or not core().stacks():
        return
    # After a fork the handler is there, and writes to the parent's pipe.
    number = _signal or _free_signal()
    if number is None:
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    faulthandler.register(number, file=writes, all_threads=False, chain=False)
    _pid, _signal, _writes = os.getpid(), number, writes
    core().frames_from(number, reads, own_folders())


def _free_signal() -> int | None:
    """A real-time signal without a handler, in C or in Python; None where /proc does not show the handlers."""
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


def own_folders() -> list[str]:
    """What the files begin with that are not the program's, but ours, torch's or the interpreter's."""
    torch = sys.modules.get("torch")
    package = str(Path(__file__).parent)
    files = [package, *([torch.__file__] if torch is not None and torch.__file__ else [])]
    return [f"{Path(file).parent}{os.sep}" for file in files] + ["<frozen "]
