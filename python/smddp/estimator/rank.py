"""One rank of a job: `python -m smddp.estimator.rank FOLDER COMMAND ...`.

The command's output is passed on and written to a log file of the rank. A failure report has the exit status and the
last lines of stderr. The process ends with the command's own exit status or signal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from smddp.estimator.job import Folder
from smddp.estimator.variables import of_rank
from smddp.launch.local import follow_parent

_LAST_LINES = 20
#: Seconds for output after the end of the command.
_DRAIN = 2.0


def main(argv: list[str]) -> int:
    folder, command = Path(argv[0]), argv[1:]
    follow_parent()
    rank, attempt = int(os.environ.get("RANK", "0")), Folder(folder).attempt
    for part in ("logs", "failures"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    env = dict(os.environ)
    if "SM_CURRENT_HOST" not in env and "GROUP_RANK" in env and "SM_HOSTS" in env:
        # torchrun of another launcher, such as torchx.
        env["SM_CURRENT_HOST"] = json.loads(env["SM_HOSTS"])[int(env["GROUP_RANK"])]
    if "SM_RESOURCE_CONFIG" in env:
        env.setdefault("SM_CURRENT_HOST", socket.gethostname())
        of_rank(env)
    code = folder / "code"
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd=code if code.is_dir() else None,
        preexec_fn=follow_parent,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: child.send_signal(got))
    last: deque[bytes] = deque(maxlen=_LAST_LINES)
    assert child.stdout is not None and child.stderr is not None
    # mpirun marks lines itself.
    name = b"" if "OMPI_COMM_WORLD_RANK" in os.environ else b"[rank %d] " % rank
    logs = folder / "logs"
    threads = [
        threading.Thread(target=_pass_on, args=(child.stdout, 1, name, logs / f"rank-{rank}.out", None), daemon=True),
        threading.Thread(target=_pass_on, args=(child.stderr, 2, name, logs / f"rank-{rank}.err", last), daemon=True),
    ]
    for thread in threads:
        thread.start()
    status = child.wait()
    ended = time.time()
    for thread in threads:
        # A process that the command left may keep the pipes open.
        thread.join(max(ended + _DRAIN - time.time(), 0))
    if status != 0:
        report = {
            "rank": rank,
            "attempt": attempt,
            "host": os.environ.get("SM_CURRENT_HOST") or socket.gethostname(),
            "pid": child.pid,
            "status": status,
            "ended": ended,
            "last": b"".join(last).decode(errors="replace"),
        }
        file = folder / "failures" / f".{rank}"
        file.write_text(json.dumps(report))
        file.rename(folder / "failures" / f"{rank}.json")
    if status < 0:
        # The launcher sees the command's own signal.
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    return status


def _pass_on(pipe: IO[bytes], to: int, name: bytes, file: Path, last: deque[bytes] | None) -> None:
    """Line by line, whole, so that lines of different ranks do not run into each other."""
    with open(file, "ab", buffering=0) as log:
        for line in pipe:
            log.write(line)
            if last is not None:
                last.append(line)
            try:
                os.write(to, name + line)
            except OSError:
                pass  # the reader has ended; the file has the line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
