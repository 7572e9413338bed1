"""`smddp status` and `smddp trace` over malformed answers and files: no traceback, and no other process is hidden."""

from __future__ import annotations

import copy
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import smddp
from smddp import files
from smddp.observability import dumps, stragglers, timeline
from smddp.observability import status as _status
from smddp.observability import trace as _trace
from smddp.tools import cli

#: No process has such a number.
PID = 5_000_000


def operation(seq: int, ended: bool = True) -> dict[str, Any]:
    return {
        "seq": seq,
        "what": f"all_reduce #{seq}",
        "call": "all_reduce(1 element of float32, sum)",
        "algorithm": "mesh",
        "bytes": 4,
        "submitted_ns": 1000 + seq,
        "started_ns": 1000 + seq,
        "ended_ns": 2000 + seq if ended else None,
        "seconds": 1e-6,
        "outcome": "ok" if ended else "running",
    }


MESSAGE = {"seq": 0, "what": "send #0 to rank 1", "call": "send()", "seconds": 8.5}


def dump(number: int = 0) -> dict[str, Any]:
    group = {
        "name": "0",
        "rank": number,
        "size": 2,
        "id": "00112233",
        "submitted": 4,
        "recorded": True,
        "pending": [
            {"seq": 3, "what": "all_reduce #3", "call": "all_reduce()", "seconds": 7.5, "message": None},
            {**MESSAGE, "message": {"sends": True, "peer": 1 - number, "tag": 0}},
        ],
        "nodes": 1,
        "way": "shm",
        "error": None,
        "finished": 2,
        "present": operation(3, ended=False),
        "last": operation(2),
        "taken": [{"collective": "all_reduce", "algorithm": "mesh", "operations": 2, "bytes": 8, "crossed": 0}],
        "operations": [operation(1), operation(2), operation(3, ended=False)],
        "messages": [operation(1)],
    }
    return {
        "version": "0.1.0",
        "host": "h0",
        "process": f"{number:016x}",
        "pid": PID + number,
        "rank": number,
        "time_ns": 5000,
        "at": "train.py:1 in main",
        "groups": [group],
    }


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of everything in a dump, from the outside in."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from leaves(each, (*place, key))


#: Put in the place of each part of a dump; GONE removes it.
GONE = object()
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
STRANGE = (
    GONE,
    None,
    True,
    -1,
    1 << 63,
    10**400,
    float("nan"),
    float("-inf"),
    1e308,
    "",
    "x/../../../escaped",
    "\x1b[2J\x00\u202e\ud800\ufffe<&'\"\n",
    "x" * 5000,
    [],
    {},
    DEEP,
)


def changed(place: tuple[Any, ...], to: Any) -> str | None:
    made: Any = dump()
    if not place:
        return None if to is GONE else json.dumps(to)
    inside = made
    for key in place[:-1]:
        inside = inside[key]
    if to is GONE:
        del inside[place[-1]]
    else:
        inside[place[-1]] = to
    return json.dumps(made)


def test_any_part_of_a_dump_may_be_strange(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Either one line says why it is refused, or everything that reads dumps can read it."""
    outside = tmp_path / "a" / "b"
    refused = 0
    for place in leaves(dump()):
        for to in STRANGE:
            text = changed(place, to)
            if text is None:
                continue
            try:
                found = dumps.parse(text)
            except ValueError as error:
                refused += 1
                assert len(str(error)) < 400, (place, str(error))
                continue
            both = [found, dump(1)]
            table = "\n".join(_status.lines(both, {1: "\x1b[2J"}))
            assert table.replace("\n", "").isprintable(), (place, to)
            stragglers.find(both)
            trace = _trace.merged(both)
            ElementTree.fromstring(timeline.drawn(trace))
            json.dumps(found, indent=2)
            if place == ("host",):
                _status._write([found], outside)
    assert refused > 500
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and all(path.parent == outside for path in written), written
    assert capsys.readouterr().err.replace("\n", "").isprintable()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, bytes, bool], None]]:
    """A process that answers, and closes the connection or keeps it."""
    opened: list[socket.socket] = []
    monkeypatch.setattr(_status, "_state", lambda pid: "S")

    def serve(pid: int, answer: bytes, closes: bool) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0smddp-status-{pid}-{_status._own_namespace()}-{pid:016x}")
        listener.listen()
        opened.append(listener)

        def run() -> None:
            connection, _ = listener.accept()
            opened.append(connection)
            connection.recv(64)
            try:
                connection.sendall(answer)
            except OSError:
                pass  # the other side has enough
            if closes:
                connection.close()

        threading.Thread(target=run, daemon=True).start()

    yield serve
    for one in opened:
        one.close()


ANSWERS: dict[str, tuple[bytes, bool, str]] = {
    "deep": (b"[" * 100_000, True, "nested more than 32 levels deep"),
    "cut off": (json.dumps(dump()).encode()[:-5], True, "invalid JSON"),
    "no text": (b"\xff\xfe\x00", True, "invalid JSON"),
    "a list": (b"[]", True, "the dump: expected an object"),
    "a key is missing": (b"{}", True, "the dump has no 'host'"),
    "another process": (json.dumps(dump(77)).encode(), True, f"its answer is of pid {PID + 77}"),
    "without an end": (b"x" * 3_000_000, False, "its answer has more than 1 MiB"),
    "unfinished": (b"{", False, ""),
    "empty": (b"", True, "no group is complete there: init or new_group still waits for other ranks"),
}


def test_malformed_answer_does_not_hide_other_processes(answering, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_status, "_PATIENCE", 0.5)
    monkeypatch.setattr(_status, "_LARGEST", 1 << 20)
    answering(PID, json.dumps(dump()).encode(), True)
    numbers = dict(zip(ANSWERS, range(PID + 1, PID + 100)))
    for name, (answer, closes, _) in ANSWERS.items():
        answering(numbers[name], answer, closes)
    options = _status.Options(pids=[PID, *numbers.values()], folder=str(tmp_path / "out"), threshold=60)
    assert _status.main(options) == 1
    said = capsys.readouterr().out
    assert f"{PID}  0      0 of 2    all_reduce #3" in said
    for name, (_, _, words) in ANSWERS.items():
        (line,) = [line for line in said.splitlines() if line.startswith(f"pid {numbers[name]}: no answer: ")]
        assert words in line, line
    assert [path.name for path in (tmp_path / "out").rglob("*.json")] == [f"smddp-h0-{PID}.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("file").write_text("")
    Path("empty").mkdir()
    Path("jobs").mkdir()
    Path("one").mkdir()
    for number in (0, 1):
        for place in (Path("one"), Path(f"jobs/job-{number}")):
            place.mkdir(exist_ok=True)
            (place / f"smddp-h0-{number}.json").write_text(json.dumps(dump(number)))
    return tmp_path


#: A command line: its exit status and words of standard error.
COMMANDS: dict[str, tuple[int, str]] = {
    "status --watch -1": (2, "--watch"),
    "status --watch 0": (2, "--watch"),
    "status --watch nan": (2, "--watch"),
    "status --watch inf": (2, "--watch"),
    "status --watch 1e300": (2, "--watch"),
    "status --threshold nan": (2, "--threshold"),
    "status --dump file": (2, "--dump file: File exists"),
    "status --dump file/x": (2, "--dump file/x: Not a directory"),
    "status --dump /proc/x": (2, "--dump /proc/x: No such file or directory"),
    "trace one/smddp-h0-0.json -o nothere/t.json": (2, "--output nothere/t.json: No such file or directory"),
    "trace one -o file/t.svg": (2, "--output file/t.svg: Not a directory"),
    "trace one -o empty": (2, "--output empty: Is a directory"),
    "trace nothere.json": (1, "nothere.json is not a dump: No such file or directory"),
    "trace fifo": (1, "fifo is not a dump: fifo is not a regular file"),
    "trace /dev/zero": (1, "/dev/zero is not a regular file"),
    "trace file": (1, "file is not a dump: invalid JSON"),
    "trace empty": (1, "empty has no dump"),
    "trace jobs": (1, "jobs has dumps of 2 jobs: give one of jobs/job-0, jobs/job-1"),
    "info -n 100000": (2, "--ranks must be at most 256, got 100000"),
    "info -n 0": (2, "--ranks must be at least 1"),
    "doctor -n 100000": (2, "--ranks 100000: the doctor starts at most"),
    "doctor --wait -5": (2, "--wait"),
    "doctor --svg nothere/x.svg": (2, "--svg nothere/x.svg: No such file or directory"),
    "doctor --svg empty": (2, "--svg empty: Is a directory"),
    "doctor --svg x.svg --quick": (2, "leave out --quick"),
    "launch s.py --distribution fifo": (2, "fifo is not a regular file"),
    "launch s.py --distribution /dev/zero": (2, "/dev/zero is not a regular file"),
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_bad_argument_is_an_error_without_a_traceback(line: str, folder: Path, capsys: pytest.CaptureFixture[str]):
    status, words = COMMANDS[line]
    before = sorted(folder.rglob("*"))
    try:
        ended = cli.main(line.split())
    except SystemExit as leaving:
        ended = leaving.code
    said = capsys.readouterr()
    assert (ended, words in said.err) == (status, True), said.err
    for name in ("Error", "Traceback", "Errno"):
        assert name not in said.err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("given", ["one", "one/smddp-h0-0.json one/smddp-h0-1.json"])
@pytest.mark.parametrize("output", ["one/trace.json", "trace.svg"])
def test_a_trace_is_made_of_a_folder_or_of_files(given, output, folder, capsys):
    for _ in range(2):
        assert cli.main(["trace", *given.split(), "-o", output]) == 0
    assert f"{output}: 8 operations of 2 processes" in capsys.readouterr().out


# ---- a full disk ----

WRITERS: dict[str, Callable[[Path], object]] = {
    "smddp.dump": lambda path: smddp.dump(str(path)),
    "write_text": lambda path: files.write_text(path, "x" * 4096),
    "status --dump": lambda path: _status._write([copy.deepcopy(dump())], path.parent),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_failed_write_preserves_the_old_file(writer: str, tmp_path: Path):
    path = tmp_path / f"smddp-h0-{PID}.json"
    path.write_text("old")
    path.chmod(0o640)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match=path.name):
            WRITERS[writer](path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    WRITERS[writer](path)
    assert path.read_text() != "old" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o640


def test_devices_and_links_are_written_through(tmp_path: Path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    files.write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    files.write_text("/dev/null", "new")
    assert not Path("/dev/null").is_file()


def test_reads_are_of_regular_files_within_a_limit(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_text("x" * 11)
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name, words in (("fifo", "not a regular file"), ("large", "more than 10 bytes"), ("bytes", "not UTF-8")):
        with pytest.raises(ValueError, match=words):
            files.read_text(tmp_path / name, 10)
    with pytest.raises(ValueError, match="not a regular file"):
        files.read_text(tmp_path)
