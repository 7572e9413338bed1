"""`smddp status`: queries the live processes of this user for their current operations.

Their service threads answer independently of all other threads. Needs neither torch nor the core.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from smddp import files
from smddp.observability import dumps, stragglers
from smddp.text import format_size, printable

_NAME = re.compile(r"@(smddp-status-(\d+)-(\d+)-[0-9a-f]{16})$")
_MAGIC = b"smddp-q1"
_STATUS, _DUMP = 2, 3
_PATIENCE = 3.0
#: Maximum size of an answer in bytes, for several hundred groups.
_LARGEST = 64 << 20


class Process(NamedTuple):
    """A process that answers status queries."""

    #: its id here, or its id in its own PID namespace if it has none here
    pid: int
    #: whether it has an id in this PID namespace
    visible: bool
    #: name of its abstract socket
    socket: str
    #: inode of its PID namespace, 0 if unknown
    namespace: int


def _sockets() -> list[tuple[int, int, str]]:
    """Returns process id, PID namespace and name of each status socket in this network namespace."""
    try:
        # Socket names may be any bytes. Accepted connections have the listener's name.
        lines = Path("/proc/net/unix").read_bytes().decode(errors="replace").split("\n")
    except OSError as error:
        text = f"smddp status: cannot list the processes ({error}): give their pids, or mount /proc"
        print(text, file=sys.stderr)
        return []
    found = {match[1]: match for line in lines if (match := _NAME.search(line))}
    return [(int(match[2]), int(match[3]), name) for name, match in found.items()]


def _own_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def pids() -> list[int]:
    """Returns the ids of processes with a status socket in this network and PID namespace, of all users."""
    own = _own_namespace()
    return sorted(pid for pid, namespace, _ in _sockets() if namespace == own)


def processes() -> list[Process]:
    """Returns the processes with a status socket in this network namespace, of all users."""
    own, found = _own_namespace(), []
    for pid, namespace, name in _sockets():
        here = pid
        if namespace != own:
            try:
                with _connect(name) as connection:
                    here = _credentials(connection)[0]
            except OSError:
                continue
        found.append(Process(here or pid, here > 0, name, namespace))
    return sorted(found)


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the listener. The process id is 0 for a process of another PID namespace."""
    read = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", read)
    return pid, uid


def ask(pid: int, what: int = _STATUS) -> dict[str, Any]:
    """Returns the answer of a process.

    Raises OSError if it does not answer within 3 seconds or belongs to another user, ValueError for an answer of
    another format or of more than 64 MiB.
    """
    for one in processes():
        if one.pid == pid and one.visible:
            return _ask(one, what)
    raise ConnectionRefusedError(f"process {pid} has no status socket")


def _ask(process: Process, what: int) -> dict[str, Any]:
    until = time.monotonic() + _PATIENCE
    with _connect(process.socket) as connection:
        owner = _credentials(connection)[1]
        if owner != os.geteuid():
            raise PermissionError(f"it belongs to user {owner}")
        connection.sendall(_MAGIC + struct.pack("<QQ", what, 0))
        answer = bytearray()
        while part := connection.recv(1 << 16):
            answer += part
            if len(answer) > _LARGEST:
                raise ValueError(f"its answer has more than {_LARGEST >> 20} MiB")
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"its answer is not complete after {_PATIENCE:g} s")
            connection.settimeout(left)
    if not answer:
        raise ConnectionError("no group is complete there: init or new_group still waits for other ranks")
    found = dumps.parse(bytes(answer), what == _DUMP)
    # A process of another PID namespace has another pid there.
    if process.visible and found["pid"] != process.pid and process.namespace == _own_namespace():
        raise ValueError(f"its answer is of pid {found['pid']}")
    found["pid"] = process.pid
    if not process.visible:
        found["other_pid_namespace"] = True
    return found


def main(asked: Sequence[int], as_json: bool, watch: float | None, folder: str | None) -> int:
    """Prints the state of the processes `asked`, or of all; every `watch` seconds until interrupted.

    Returns 1 if one of them does not answer or a dump cannot be written, 2 if `folder` cannot be used, else 0.
    """
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"smddp status: --dump {printable(folder)}: {error.strerror}", file=sys.stderr)
            return 2
    try:
        return _shown(asked, as_json, watch, folder)
    except KeyboardInterrupt:
        return 0 if watch else 130


def _shown(asked: Sequence[int], as_json: bool, watch: float | None, folder: str | None) -> int:
    while True:
        answers, failed = _gather(asked, _DUMP)
        if folder:
            try:
                _write(answers, Path(folder))
            except OSError as error:
                print(f"smddp status: {printable(error.filename)}: {error.strerror}", file=sys.stderr)
                return 1
        late = [one for job in _jobs(answers) for one in stragglers.find(job)]
        if as_json:
            for group in (group for one in answers for group in one["groups"] if not folder):
                del group["operations"], group["messages"]
            found = {"processes": answers, "silent": failed, "stragglers": [asdict(one) for one in late]}
            print(json.dumps(found, indent=None if watch else 2))
        else:
            clear = "\033[H\033[2J" if watch and sys.stdout.isatty() else ""
            print(clear + "\n".join(lines(answers, failed) + [printable(one) for one in late]))
        if watch is None:
            return 1 if failed else 0
        sys.stdout.flush()
        time.sleep(watch)


def _jobs(answers: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Groups the processes by parent: a launcher starts the ranks of one job."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for one in answers:
        jobs.setdefault(_parent(one), []).append(one)
    return list(jobs.values())


def job() -> list[dict[str, Any]]:
    """Returns the dumps of this process and its siblings if it is the first of them, else an empty list."""
    parent = str(os.getppid())
    found = [pid for pid in pids() if _stat(pid, 1) == parent]
    return _gather(found, _DUMP)[0] if found[:1] == [os.getpid()] else []


def _gather(asked: Sequence[int], what: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    found = [one for one in processes() if not asked or one.pid in asked]
    answers: list[dict[str, Any]] = []
    failed = {pid: _why(pid, ConnectionRefusedError()) for pid in set(asked) - {one.pid for one in found}}
    for one in found:
        try:
            # The socket of a stopped process still accepts connections.
            if one.visible and _state(one.pid) in ("T", "t"):
                failed[one.pid] = "stopped (by a signal or a debugger)"
                continue
            answers.append(_ask(one, what))
        except PermissionError as error:
            if asked:
                failed[one.pid] = str(error)
        except (OSError, ValueError) as error:
            failed[one.pid] = _why(one.pid, error) if one.visible else f"no answer: {error}"
    answers.sort(key=lambda one: (one["rank"] is None, one["rank"] or 0, one["pid"]))
    return answers, failed


def _parent(one: dict[str, Any]) -> str:
    """Returns the parent's id of a process, or "" if unknown."""
    return "" if one.get("other_pid_namespace") else _stat(one["pid"], 1)


def _state(pid: int) -> str:
    """Returns the kernel's state letter, or "" if the process does not exist."""
    return _stat(pid, 0)


def _stat(pid: int, field: int) -> str:
    """Returns a field of /proc/PID/stat after the process name: 0 the state, 1 the parent."""
    try:
        # /proc may belong to the PID namespace of a parent.
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[field]
    except (OSError, IndexError):
        return ""


def _why(pid: int, error: Exception) -> str:
    if not _state(pid):
        return "no such process"
    return "no group of smddp is open there" if isinstance(error, ConnectionRefusedError) else f"no answer: {error}"


def _write(answers: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes a file per process, in a folder per job if there are several: a trace or a replay is of one job."""
    jobs = _jobs(answers)
    for job in jobs:
        place = folder if len(jobs) == 1 else folder / f"job-{_parent(job[0]) or 'unknown'}"
        place.mkdir(parents=True, exist_ok=True)
        for one in job:
            # The process supplies the host name, which must not select another folder.
            path = place / f"smddp-{re.sub('[^A-Za-z0-9._-]', '_', one['host'])[:128]}-{one['pid']}.json"
            files.write_text(path, json.dumps(one))
            print(printable(path), file=sys.stderr)


def lines(answers: Sequence[dict[str, Any]], failed: dict[int, str]) -> list[str]:
    """Returns a table with a row for each group of each process."""
    rows: list[tuple[str, ...]] = [
        ("RANK", "PID", "GROUP", "IN GROUP", "OPERATION", "ELAPSED", "LAST FINISHED", "ALGORITHM", "FRAME")
    ]
    for one in answers:
        for group in one["groups"] or [None]:
            rows.append(_row(one, group))
    rows = [tuple(printable(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    silent = [printable(f"pid {pid}: {why}") for pid, why in failed.items()]
    if len(rows) == 1:
        return silent or ["no process of this user has a group of smddp open here"]
    return table + silent


def _row(one: dict[str, Any], group: dict[str, Any] | None) -> tuple[str, ...]:
    rank = "-" if one["rank"] is None else str(one["rank"])
    if group is None:
        return (rank, str(one["pid"]), "-", "-", "-", "-", "-", "-", one["at"])
    present, last = group["present"], group["last"]
    operation, elapsed = ("-", "-") if present is None else (present["what"], f"{present['seconds']:.1f} s")
    if group["error"]:
        operation = "failed"
    totals: dict[str, int] = {}
    for entry in group["taken"]:
        totals[entry["algorithm"]] = totals.get(entry["algorithm"], 0) + entry["bytes"]
    moved = ", ".join(f"{name} {format_size(total)}" for name, total in totals.items())
    return (
        rank,
        str(one["pid"]),
        group["name"],
        f"{group['rank']} of {group['size']}",
        operation,
        elapsed,
        "-" if last is None else last["what"],
        f"{group['way']}: {moved}" if moved else group["way"],
        one["at"],
    )
