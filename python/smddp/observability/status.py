"""`smddp status`: queries the live processes of this user, and through them the other hosts of their jobs.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from smddp import files
from smddp.observability import dumps, jobs, links, status_table, stragglers, verdict
from smddp.observability.jobs import Job, Member
from smddp.observability.links import SlowLink
from smddp.observability.verdict import Verdict
from smddp.text import printable

_NAME = re.compile(r"@(smddp-status-(\d+)-(\d+)-[0-9a-f]{16})$")
_MAGIC = b"smddp-q1"
_STATUS, _DUMP, _JOB = 2, 3, 4
#: Seconds to wait for an answer, and for that of a process that queries the other hosts for at most 8 s.
_PATIENCE, _JOB_PATIENCE = 3.0, 11.0
#: Seconds after which no further process is asked about the other hosts, and jobs whose processes are asked at a time.
_ALL_JOBS, _CONCURRENT_JOBS = 10.0, 8
#: Maximum size of an answer in bytes, for several hundred groups.
_LARGEST = 64 << 20
#: Seconds after which a pending call counts as waiting.
THRESHOLD = 5.0


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


def _ask_job(process: Process) -> Any:
    """Returns the answer of a process to a job query: the state of the ranks of other hosts in its groups."""
    answer = _exchange(process, _JOB, _JOB_PATIENCE)
    if not answer:
        raise ConnectionError("no answer: it is of another version, or answers too many such queries")
    return json.loads(answer)


def _exchange(process: Process, what: int, patience: float) -> bytes:
    """Sends a query and returns the whole answer."""
    until = time.monotonic() + patience
    with _connect(process.socket) as connection:
        owner = _credentials(connection)[1]
        if owner != os.geteuid():
            raise PermissionError(f"it belongs to user {owner}")
        connection.sendall(_MAGIC + struct.pack("<QQ", what, 0))
        connection.settimeout(patience)
        answer = bytearray()
        while part := connection.recv(1 << 16):
            answer += part
            if len(answer) > _LARGEST:
                raise ValueError(f"its answer has more than {_LARGEST >> 20} MiB")
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"its answer is not complete after {patience:g} s")
            connection.settimeout(left)
    return bytes(answer)


def _ask(process: Process, what: int) -> dict[str, Any]:
    answer = _exchange(process, what, _PATIENCE)
    if not answer:
        raise ConnectionError("no group is complete there: init or new_group still waits for other ranks")
    found = dumps.parse(answer, what == _DUMP)
    # A process of another PID namespace has another pid there.
    if process.visible and found["pid"] != process.pid and process.namespace == _own_namespace():
        raise ValueError(f"its answer is of pid {found['pid']}")
    found["pid"] = process.pid
    if not process.visible:
        found["other_pid_namespace"] = True
    return found


class Options(NamedTuple):
    """Arguments of `smddp status`."""

    #: processes to query; empty: all of this user
    pids: Sequence[int] = ()
    as_json: bool = False
    #: seconds between two queries; None: one query
    watch: float | None = None
    #: folder for dumps
    folder: str | None = None
    #: no queries of other hosts
    host_only: bool = False
    #: seconds after which a pending call counts as waiting
    threshold: float = THRESHOLD
    #: width of the terminal
    columns: int = 10_000


class _State(NamedTuple):
    """Result of all queries."""

    answers: list[dict[str, Any]]
    #: reasons of processes of this host without an answer, by process id
    failed: dict[int, str]
    jobs: Sequence[Job] = ()
    #: their verdicts
    verdicts: Sequence[Verdict] = ()
    stragglers: Sequence[list[stragglers.Straggler]] = ()
    slow_links: Sequence[list[SlowLink]] = ()

    def status(self) -> int:
        """Returns the exit status."""
        if any(one.waits_long for one in self.verdicts):
            return 3
        silent = self.failed or any(one.silent or one.problems for one in self.jobs)
        return 1 if silent else 0


def main(options: Options) -> int:
    """Prints the state of the processes and their jobs; repeatedly with `watch`, until interrupted.

    Returns 0 if no call waits long, 1 if a process does not answer or a dump cannot be written, 2 if the folder cannot
    be used, 3 if a call waits for the threshold or longer.
    """
    if options.folder:
        try:
            Path(options.folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"smddp status: --dump {printable(options.folder)}: {error.strerror}", file=sys.stderr)
            return 2
    try:
        return _shown(options)
    except KeyboardInterrupt:
        return 0 if options.watch else 130


def _shown(options: Options) -> int:
    history = links.History()
    while True:
        state = _query(options, history)
        if options.folder:
            try:
                _write(state.answers, Path(options.folder))
            except OSError as error:
                print(f"smddp status: {printable(error.filename)}: {error.strerror}", file=sys.stderr)
                return 1
        if options.as_json:
            print(json.dumps(_as_json(state, options), indent=None if options.watch else 2))
        else:
            clear = "\033[H\033[2J" if options.watch and sys.stdout.isatty() else ""
            print(clear + "\n".join(_text(state, options.columns)))
        if options.watch is None:
            return state.status()
        sys.stdout.flush()
        time.sleep(options.watch)


def _query(options: Options, history: links.History) -> _State:
    answers, failed, sockets = _gather(options.pids, _DUMP)
    found = jobs.of(answers, _parent)
    late = [stragglers.find(job.processes) for job in found]
    if not options.pids and not options.host_only:
        _complete(found, {id(one): place for one, place in zip(answers, sockets)})
        host = socket.gethostname()
        for job in found:
            for pid, reason in failed.items():
                if job.has_member(Member(host, pid)):
                    job.add_silent(Member(host, pid), reason)
    judged = []
    for job, stragglers_of, slow in zip(found, late, history.read([job.processes for job in found])):
        job.processes.sort(key=jobs.order)
        judged.append((job, verdict.of(job, options.threshold), stragglers_of, slow))
    # Jobs that wait come first.
    judged.sort(key=lambda one: not one[1].waits_long)
    return _State(answers, failed, *(list(part) for part in zip(*judged))) if judged else _State(answers, failed)


def _complete(found: Sequence[Job], places: dict[int, Process]) -> None:
    """Queries the other hosts of all jobs, several at a time. places: the processes, by the id of their dump."""
    until = time.monotonic() + _ALL_JOBS

    def complete(job: Job) -> None:
        jobs.complete(job, lambda one: _ask_job(places[id(one)]), max(until - time.monotonic(), 0))

    if len(found) == 1:
        return complete(found[0])
    with ThreadPoolExecutor(_CONCURRENT_JOBS) as pool:
        for _ in pool.map(complete, found):
            pass


def _as_json(state: _State, options: Options) -> dict[str, Any]:
    for group in (group for one in state.answers for group in one["groups"] if not options.folder):
        del group["operations"], group["messages"]
    local = {id(one) for one in state.answers}
    return {
        "processes": [{**one, "local": id(one) in local} for job in state.jobs for one in job.processes],
        "silent": state.failed,
        "stragglers": [asdict(one) for late in state.stragglers for one in late],
        "jobs": [verdict.as_json(*found) for found in zip(state.jobs, state.verdicts, state.slow_links)],
    }


def _text(state: _State, columns: int) -> list[str]:
    """Returns the verdicts of all jobs, then the table, the silent processes and the history of each."""
    found = list(zip(state.jobs, state.verdicts, state.stragglers, state.slow_links))
    several = len(found) > 1
    head, tables, named = [], [], set()
    for number, (job, judged, late, slow) in enumerate(found, 1):
        title = f"job {number}: " if several else ""
        head += [title + sentence for sentence in judged.sentences]
        if several:
            hosts = sorted({one["host"] for one in job.processes} | {one.member.host for one in job.silent})
            many = len(job.processes) + len(job.silent)
            named_hosts = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
            tables += [
                "",
                f"job {number}: {many} process{'es'[: 2 * (many > 1)]}, host{'s'[: len(hosts) > 1]} {named_hosts}",
            ]
        tables += status_table.rows(job.processes, columns)
        tables += [f"{one}: {one.reason}" for one in job.silent] + job.problems
        tables += [f"history: {one}" for one in late] + links.history(slow)
        named |= {one.member for one in job.silent}
    host = socket.gethostname()
    rest = [f"pid {pid}: {reason}" for pid, reason in state.failed.items() if Member(host, pid) not in named]
    text = [*head, *tables, *rest]
    return [printable(line) for line in text] or ["no process of this user has a group of smddp open here"]


def lines(answers: Sequence[dict[str, Any]], failed: dict[int, str], columns: int = 10_000) -> list[str]:
    """Returns the verdicts and the tables of these processes."""
    found = jobs.of(answers, _parent)
    slow = links.History().read([job.processes for job in found])
    state = _State(
        list(answers), failed, found, [verdict.of(job, THRESHOLD) for job in found], [[] for _ in found], slow
    )
    return _text(state, columns)


def job() -> list[dict[str, Any]]:
    """Returns the dumps of this process and its siblings if it is the first of them, else an empty list."""
    parent = str(os.getppid())
    found = [pid for pid in pids() if _stat(pid, 1) == parent]
    return _gather(found, _DUMP)[0] if found[:1] == [os.getpid()] else []


def _gather(asked: Sequence[int], what: int) -> tuple[list[dict[str, Any]], dict[int, str], list[Process]]:
    """Queries processes of this host. Returns the answers, the reasons without one by pid, and who answered."""
    found = [one for one in processes() if not asked or one.pid in asked]
    answers: list[tuple[dict[str, Any], Process]] = []
    failed = {pid: _reason(pid, ConnectionRefusedError()) for pid in set(asked) - {one.pid for one in found}}
    for one in found:
        try:
            # The socket of a stopped process still accepts connections.
            if one.visible and _state(one.pid) in ("T", "t"):
                failed[one.pid] = "stopped (by a signal or a debugger)"
                continue
            answers.append((_ask(one, what), one))
        except PermissionError as error:
            if asked:
                failed[one.pid] = str(error)
        except (OSError, ValueError) as error:
            failed[one.pid] = _reason(one.pid, error) if one.visible else f"no answer: {error}"
    answers.sort(key=lambda found: jobs.order(found[0]))
    return [found for found, _ in answers], failed, [one for _, one in answers]


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


def _reason(pid: int, error: Exception) -> str:
    if not _state(pid):
        return "no such process"
    return "no group of smddp is open there" if isinstance(error, ConnectionRefusedError) else f"no answer: {error}"


def _write(answers: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes a file per process, in a folder per job if there are several: a trace or a replay is of one job."""
    found = jobs.of(answers, _parent)
    places: set[Path] = set()
    for job in found:
        name = f"job-{_parent(job.processes[0]) or 'unknown'}"
        place = folder if len(found) == 1 else folder / name
        # One launcher may have started several jobs.
        more = (folder / f"{name}-{number}" for number in count(2))
        place = next(each for each in chain([place], more) if each not in places)
        places.add(place)
        place.mkdir(parents=True, exist_ok=True)
        for one in job.processes:
            # The process supplies the host name, which must not select another folder.
            path = place / f"smddp-{re.sub('[^A-Za-z0-9._-]', '_', one['host'])[:128]}-{one['pid']}.json"
            files.write_text(path, json.dumps(one))
            print(printable(path), file=sys.stderr)
