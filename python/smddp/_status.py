"""`smddp status`: asks the live processes of this user what they are doing. Their service threads answer, whatever the
other threads do. Needs neither torch nor the core.
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
from typing import Any

from smddp import dumps, files, stragglers
from smddp.text import printable

_NAME = "smddp-status-"
_MAGIC = b"smddp-q1"
_STATUS, _DUMP = 2, 3
_PATIENCE = 3.0
#: Bytes of the largest answer: the recorders of some hundred groups.
_LARGEST = 64 << 20


def pids() -> list[int]:
    """The processes of this network namespace that can be asked, this user's or not."""
    found = set()
    # Names of sockets are any bytes.
    for line in Path("/proc/net/unix").read_bytes().decode(errors="replace").split("\n"):
        name = line.rpartition(" ")[2]
        if name.startswith(f"@{_NAME}") and name[len(_NAME) + 1 :].isdecimal():
            found.add(int(name[len(_NAME) + 1 :]))
    return sorted(found)


def ask(pid: int, what: int = _STATUS) -> dict[str, Any]:
    """Returns the answer of a process.

    Raises OSError if it does not answer within 3 seconds or belongs to another user, ValueError for an answer of
    another format or of more than 64 MiB.
    """
    until = time.monotonic() + _PATIENCE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(f"\0{_NAME}{pid}")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        owner = struct.unpack("3i", credentials)[1]
        if owner != os.geteuid():
            raise PermissionError(f"it is user {owner}'s")
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
    if found["pid"] != pid:
        raise ValueError(f"its answer is of pid {found['pid']}")
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
        told, failed = _gather(asked, _DUMP)
        if folder:
            try:
                _write(told, Path(folder))
            except OSError as error:
                print(f"smddp status: {printable(error.filename)}: {error.strerror}", file=sys.stderr)
                return 1
        late = [one for job in _jobs(told) for one in stragglers.told(job)]
        if as_json:
            for group in (group for one in told for group in one["groups"] if not folder):
                del group["operations"], group["messages"]
            found = {"processes": told, "silent": failed, "stragglers": [asdict(one) for one in late]}
            print(json.dumps(found, indent=None if watch else 2))
        else:
            clear = "\033[H\033[2J" if watch and sys.stdout.isatty() else ""
            print(clear + "\n".join(lines(told, failed) + [printable(one) for one in late]))
        if watch is None:
            return 1 if failed else 0
        sys.stdout.flush()
        time.sleep(watch)


def _jobs(told: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The processes by their parent: a launcher starts the ranks of one job."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for one in told:
        jobs.setdefault(_stat(one["pid"], 1), []).append(one)
    return list(jobs.values())


def job() -> list[dict[str, Any]]:
    """The dumps of this process and of its parent's others, for the first of them; none for the rest."""
    parent = str(os.getppid())
    found = [pid for pid in pids() if _stat(pid, 1) == parent]
    return _gather(found, _DUMP)[0] if found[:1] == [os.getpid()] else []


def _gather(asked: Sequence[int], what: int) -> tuple[list[dict[str, Any]], dict[int, str]]:
    told, failed = [], {}
    for pid in asked or pids():
        try:
            # Its socket would take the question up all the same.
            if _state(pid) in ("T", "t"):
                failed[pid] = "stopped (by a signal or a debugger)"
                continue
            told.append(ask(pid, what))
        except PermissionError as error:
            if asked:
                failed[pid] = str(error)
        except (OSError, ValueError) as error:
            failed[pid] = _why(pid, error)
    told.sort(key=lambda one: (one["rank"] is None, one["rank"] or 0, one["pid"]))
    return told, failed


def _state(pid: int) -> str:
    """The kernel's letter; "" where there is no such process."""
    return _stat(pid, 0)


def _stat(pid: int, field: int) -> str:
    """Of what the kernel says behind a process's name, the state first and then the parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[field]
    except (OSError, IndexError):
        return ""


def _why(pid: int, error: Exception) -> str:
    if not _state(pid):
        return "no such process"
    return "no group of smddp is open there" if isinstance(error, ConnectionRefusedError) else f"no answer: {error}"


def _write(told: Sequence[dict[str, Any]], folder: Path) -> None:
    """A file for each process, and a folder for each job where there are several: a trace or a replay is of one."""
    jobs = _jobs(told)
    for job in jobs:
        place = folder if len(jobs) == 1 else folder / f"job-{_stat(job[0]['pid'], 1) or 'gone'}"
        place.mkdir(parents=True, exist_ok=True)
        for one in job:
            # The host's name comes from the process: no folder of its choice.
            path = place / f"smddp-{re.sub('[^A-Za-z0-9._-]', '_', one['host'])[:128]}-{one['pid']}.json"
            files.write_text(path, json.dumps(one))
            print(printable(path), file=sys.stderr)


def lines(told: Sequence[dict[str, Any]], failed: dict[int, str]) -> list[str]:
    """A table: a row for each group of each process."""
    rows: list[tuple[str, ...]] = [
        ("RANK", "PID", "GROUP", "IN GROUP", "DOES", "FOR", "LAST FINISHED", "MOVED BY", "AT")
    ]
    for one in told:
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
    does, since = ("-", "-") if present is None else (present["what"], f"{present['seconds']:.1f} s")
    if group["error"]:
        does = "dead"
    ways: dict[str, int] = {}
    for way in group["taken"]:
        ways[way["algorithm"]] = ways.get(way["algorithm"], 0) + way["bytes"]
    moved = ", ".join(f"{name} {_size(size)}" for name, size in ways.items())
    return (
        rank,
        str(one["pid"]),
        group["name"],
        f"{group['rank']} of {group['size']}",
        does,
        since,
        "-" if last is None else last["what"],
        f"{group['way']}: {moved}" if moved else group["way"],
        one["at"],
    )


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
