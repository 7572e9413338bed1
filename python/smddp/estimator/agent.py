"""The process of a job on each host: `python -m smddp.estimator.agent`, with one line of JSON on its input.

It makes the job's folder and starts the host's command. It sends the command's output and failure reports of ranks. All
of its processes end when its input ends: the launcher closed it or ended, or the connection broke.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

from smddp.estimator.job import Folder

#: Seconds that ranks have after SIGTERM.
_GRACE = 3.0
_PR_SET_PDEATHSIG = 1


def main() -> int:
    given = json.loads(sys.stdin.buffer.readline())
    folder = Path(given["folder"])
    if given["restart"]:
        _end_earlier_attempt(folder)
        Folder(folder).reset()
    if given["files"] is None:
        return _run(given, folder)
    # In a folder that hosts share the token is the launcher's, which restarts need.
    token, shared = Folder(folder).token, Folder(folder).token.exists()
    try:
        _unpack(given["files"], folder)
        return _run(given, folder)
    finally:
        if not shared:
            token.unlink(missing_ok=True)


def _unpack(files: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # No other user reads a file before it has its sender's mode.
    mask = os.umask(0o077)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(files)), mode="r:gz") as archive:
        # The sender runs commands here. Channels are links to places outside of the folder.
        archive.extractall(folder, filter="fully_trusted")
    os.umask(mask)


def _run(given: dict[str, Any], folder: Path) -> int:
    say({"ready": os.getpid()})
    over = threading.Event()
    reporting = threading.Thread(target=_report_failures, args=(folder, over), daemon=True)
    if given["argv"] is None:
        # Another host's command starts this one's ranks.
        reporting.start()
        _input_ends()
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
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except OSError as error:
        say({"unable": f"{given['argv'][0]}: {error.strerror}"})
        return 0
    _note_group(folder, child.pid)
    threading.Thread(target=_end_with_input, args=(child, over), daemon=True).start()
    reporting.start()
    assert child.stdout is not None
    for line in child.stdout:
        say({"line": line.decode(errors="replace").rstrip("\n")})
    status = child.wait()
    over.set()
    reporting.join()
    _end(child.pid)
    say({"status": status})
    return 0


def _begun(pid: int) -> str:
    """Returns the start time of a process, in the system's clock ticks; empty after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _note_group(folder: Path, group: int) -> None:
    """Notes the process group of this host's command, with the start time of its leader."""
    file = Folder(folder).logs / f"command-{socket.gethostname()}-{group}.pid"
    file.write_text(f"{group} {_begun(group)}")


def _end_earlier_attempt(folder: Path) -> None:
    """Ends the ranks of agents that were killed: they would write into the checkpoints of the next attempt."""
    for file in Folder(folder).logs.glob(f"command-{socket.gethostname()}-*.pid"):
        try:
            group, begun = file.read_text().split()
        except (OSError, ValueError):
            continue  # another agent of this host has ended it
        # A group may outlive its leader. No other process has the leader's number as long as the group exists.
        if _begun(int(group)) in (begun, ""):
            _end(int(group))
        file.unlink(missing_ok=True)


def _input_ends() -> None:
    """By the descriptor: Python's own stdin may not be in use when it ends."""
    while os.read(0, 4096):
        pass


_lock = threading.Lock()


def say(what: dict[str, Any]) -> None:
    with _lock:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def _end_with_input(child: subprocess.Popen[bytes], over: threading.Event) -> None:
    _input_ends()
    if not over.is_set():
        _end(child.pid)


def _end(group: int) -> None:
    """Ends all of a process group: asks, then kills."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + _GRACE
        while number == signal.SIGTERM and time.monotonic() < until:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def _report_failures(folder: Path, over: threading.Event) -> None:
    known: set[str] = set()
    while True:
        last = over.wait(0.1)
        for file in sorted((folder / "failures").glob("*.json")):
            if file.name not in known:
                known.add(file.name)
                say({"failed": json.loads(file.read_text())})
        if last:
            return


if __name__ == "__main__":
    sys.exit(main())
