"""Processes of a job on this machine, found by the job's variables, which children inherit.

torchrun and mpirun start each rank in a separate process group, so the group of the host's command is not enough.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from smddp.estimator.job import Folder

#: Seconds between SIGTERM and SIGKILL, and after SIGKILL.
_GRACE, _LAST = 3.0, 1.0


def of_job(folder: Path, host: str | None = None) -> list[int]:
    """Returns the processes of the job in `folder`; with `host` those of one of its hosts."""
    wanted = {f"SM_OUTPUT_DIR={Folder(folder).output}".encode()}
    if host is not None:
        wanted.add(f"SM_CURRENT_HOST={host}".encode())
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def end(folder: Path, host: str | None = None) -> None:
    """Ends the processes of a job: SIGTERM, and SIGKILL after a grace period. `host` is that of `of_job`."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _LAST)):
        asked: set[int] = set()
        until = time.monotonic() + seconds
        while (pids := of_job(folder, host)) and time.monotonic() < until:
            for pid in set(pids) - asked:
                with suppress(OSError):
                    os.kill(pid, number)
            asked.update(pids)
            time.sleep(0.05)
        if not pids:
            return
