"""The process of a job on each host: `python -m smddp.estimator.agent`, with one line of JSON on its input.

It makes the job's folder and starts the host's command. It sends the command's output and failure reports of ranks. All
of its processes end when its input ends: the launcher closed it or ended, or the connection broke.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from smddp.estimator import archives, processes
from smddp.estimator.job import Folder
from smddp.launch.local import follow_parent

#: Seconds for output after the end of the command: another program may keep the pipe open.
_DRAIN = 0.5


def main() -> int:
    given = json.loads(sys.stdin.buffer.readline())
    folder = Path(given["folder"])
    if given["attempt"] > 1:
        # Ranks of an agent that was killed would write into the checkpoints of this attempt.
        processes.end(folder)
        Folder(folder).reset(given["attempt"])
    if given["files"] is None:
        return _run(given, folder)
    # In a folder that hosts share the token is the launcher's, which restarts need.
    token, shared = Folder(folder).token, Folder(folder).token.exists()
    try:
        archives.unpack(given["files"], folder)
        return _run(given, folder)
    finally:
        if not shared:
            token.unlink(missing_ok=True)


def _run(given: dict[str, Any], folder: Path) -> int:
    say({"ready": os.getpid()})
    over = threading.Event()
    reporting = threading.Thread(target=_report_failures, args=(folder, over), daemon=True)
    if given["argv"] is None:
        # Another host's command starts this one's ranks.
        reporting.start()
        _input_ends()
        processes.end(folder)
        over.set()
        reporting.join()
        return 0
    if sys.stdin.buffer.readline() != b"start\n":
        return 0
    try:
        child = subprocess.Popen(
            given["argv"],
            env={**os.environ, **given["env"]},
            cwd=given["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Ranks end with an agent that is killed.
            preexec_fn=follow_parent,
        )
    except OSError as error:
        say({"unable": f"{given['argv'][0]}: {error.strerror}"})
        return 0
    host = given["env"].get("SM_CURRENT_HOST")
    threading.Thread(target=_end_with_input, args=(folder, host, over), daemon=True).start()
    reporting.start()
    output = threading.Thread(target=_pass_on, args=(child.stdout,), daemon=True)
    output.start()
    status = child.wait()
    over.set()
    reporting.join()
    processes.end(folder, host)
    output.join(_DRAIN)
    say({"status": status})
    return 0


def _pass_on(pipe: IO[bytes]) -> None:
    for line in pipe:
        say({"line": line.decode(errors="replace").rstrip("\n")})


def _input_ends() -> None:
    """By the descriptor: Python's own stdin may not be in use when it ends."""
    while os.read(0, 4096):
        pass


_lock = threading.Lock()


def say(what: dict[str, Any]) -> None:
    with _lock:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def _end_with_input(folder: Path, host: str | None, over: threading.Event) -> None:
    _input_ends()
    if not over.is_set():
        processes.end(folder, host)


def _report_failures(folder: Path, over: threading.Event) -> None:
    known: set[str] = set()
    while True:
        last = over.wait(0.1)
        for file in sorted((folder / "failures").glob("*.json")):
            if file.name not in known:
                known.add(file.name)
                say({"failed": file.read_text(errors="replace")})
        if last:
            return


if __name__ == "__main__":
    sys.exit(main())
