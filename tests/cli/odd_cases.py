"""Odd command lines and files of all programs, with the exit status that each one is documented to have."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: No process has such a number.
NO_PROCESS = "4999999"
#: A word of a command line that is not UTF-8, as Python has it in sys.argv.
NOT_UTF8 = os.fsdecode(b"\xff\xfe")
#: Values that no option for a count, time or size accepts.
NO_NUMBERS = ("", "x", "nan", "-1", "1e99", "9" * 30, "0x10", "1;5", NOT_UTF8)


@dataclass(frozen=True)
class Case:
    program: str
    words: tuple[str, ...]
    #: Permitted exit statuses.
    statuses: tuple[int, ...] = (2,)
    environment: dict[str, str] = field(default_factory=dict)


def write_files(folder: Path) -> dict[str, Path]:
    """Writes files that no program can use into `folder`, and returns them and other paths by name."""
    texts: dict[str, bytes] = {
        "empty": b"",
        "binary": bytes(range(256)) * 16,
        "truncated": b'{"version": "0.1.0", "host": "h", "groups": [{"na',
        "number": b"17",
        "null": b"null",
        "list": b"[1, 2, [3]]",
        "deep": b"[" * 100_000,
        "deep-object": b'{"results":' * 50_000,
        "keys": b'{"groups": null, "results": 7, "host": [], "size": "x"}',
        "nan": b'{"results": [{"size": NaN, "out_of_place": {"time": Infinity}}], "groups": [{"rank": 1e999}]}',
        "rows": b'{"results": [null, 1, {}], "groups": [{}, []], "processes": [[]]}',
        "toml": b"nodes = [[[\nname = \x00",
        "toml-types": b'name = 7\nnodes = "many"\nrails = -1\n',
        "latin1": "résumé".encode("latin1"),
    }
    found = {name: folder / name for name in texts}
    for name, content in texts.items():
        found[name].write_bytes(content)
    found["fifo"] = folder / "fifo"
    os.mkfifo(found["fifo"])
    for name in ("folder", "folder.svg"):
        found[name] = folder / name
        found[name].mkdir()
    found |= {
        "missing": folder / "missing.json",
        "inside-a-file": found["empty"] / "x.json",
        "long-name": folder / ("n" * 300),
        "long-path": Path("/tmp", *["deep"] * 1000),
        "device": Path("/dev/null"),
        "terminal": Path("/dev/tty"),
        "memory": Path("/proc/self/mem"),
        "not-utf8": Path(os.fsdecode(bytes(folder) + b"/\xff.json")),
        "script": folder / "script.py",
    }
    found["not-utf8"].write_bytes(b"\xff")
    found["script"].write_text("print('ran')\n")
    return found


#: Files that can be read, and contain nothing that a program can use.
UNUSABLE = (
    *("empty", "binary", "truncated", "number", "null", "list", "deep", "deep-object", "keys", "nan", "rows", "toml"),
    *(
        "toml-types",
        "latin1",
        "fifo",
        "folder",
        "missing",
        "inside-a-file",
        "long-name",
        "long-path",
        "device",
        "memory",
    ),
    "not-utf8",
)


def outputs(files: dict[str, Path]) -> list[str]:
    """Returns names of files that cannot be written."""
    beside = files["folder"].parent
    return [
        "/proc/no/such/x.svg",
        str(files["inside-a-file"].with_suffix(".svg")),
        str(beside / ("n" * 300 + ".svg")),
        "/proc/x.svg",
        str(files["folder.svg"]),
        "",
    ]


def command_lines() -> Iterator[Case]:
    """Yields command lines without files."""
    for words in (
        *((), ("",), ("--unknown",), ("inf",), ("infos",), (NOT_UTF8,), ("--json",), ("-n", "2"), ("info", "doctor")),
        *(("info", "--unknown"), ("info", "x"), ("info", "-n", "0"), ("info", "-n", "257"), ("info", "-n", NOT_UTF8)),
        *(
            ("doctor", "--svg"),
            ("doctor", "--wait"),
            ("doctor", "x"),
            ("doctor", "-n", "999999"),
            ("doctor", "-n", "0"),
        ),
        *(("doctor", "--quick", "--svg", "x.svg"), ("doctor", NOT_UTF8), ("doctor", "--by-doctor=x")),
        *(("status", "--watch", "0"), ("status", "--watch", "-1"), ("status", "--watch", "nan"), ("status", "x")),
        *(("status", "--watch", "1e9"), ("status", "1.5"), ("status", NOT_UTF8), ("status", "--dump")),
        *(("status", "--threshold", "-1"), ("status", "--threshold", "x"), ("status", "--threshold")),
        *(("trace",), ("trace", "-o"), ("trace", "--unknown", "x"), ("trace", "x", "--output")),
        *(("launch",), ("launch", "--unknown"), ("launch", ""), ("launch", NOT_UTF8), ("launch", "--", "x")),
        *(("report",), ("completion",), ("completion", "powershell"), ("man", "x"), ("man", NOT_UTF8)),
    ):
        yield Case("smddp", words)
    for number in NO_NUMBERS:
        yield Case("smddp", ("info", f"--ranks={number}"))
        yield Case("smddp", ("doctor", f"--ranks={number}"))
        yield Case("smddp", ("doctor", f"--wait={number}"))
        yield Case("smddprun", (f"--nproc={number}", "true"))
    for pid in (NO_PROCESS, "0", "-1", "9" * 30):
        yield Case("smddp", ("status", pid), (1, 2))
    for words in (
        *((), ("",), ("--unknown", "true"), ("-n",), ("--nproc", "4097", "true"), ("--nproc", "0", "true"), ("--",)),
        *(("-x",), ("-x", "=1", "true"), ("-x", "A B=1", "true"), ("--tag-output=x", "true"), ("--nproc", "2")),
        *(("-x", f"{NOT_UTF8}=1"), (NOT_UTF8, "-n"), ("-np", NOT_UTF8, "true")),
    ):
        yield Case("smddprun", words, (2,))
    for command, status in (("/no/such/program", 127), ("/etc", 126), ("/dev/null", 126), (NOT_UTF8, 127)):
        yield Case("smddprun", ("-n", "2", command), (status,))
    for program in ("smddpmprun", "smddpsinglenode"):
        yield from (Case(program, words) for words in ((), ("--unknown",), ("-n", "x", "true"), ("-n", "-3", "true")))
    yield from launcher_variables()
    yield from bench_lines()


def launcher_variables() -> Iterator[Case]:
    """Yields wrong variables of launchers and of the settings."""
    for variables in (
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "3", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "9" * 30},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"},
        {"RANK": NOT_UTF8, "WORLD_SIZE": "2"},
    ):
        yield Case("smddp-bench", ("all_gather",), (1, 2), variables)
        yield Case("smddp", ("doctor", "--quick"), (1, 2), variables)
    for setting, value in (
        ("SMDDP_TRANSPORT", "x"),
        ("SMDDP_ALGO", NOT_UTF8),
        ("SMDDP_STAGING_BYTES", "-1"),
        ("SMDDP_TUNE", "/no/such/file"),
        ("SMDDP_WIRE_FORMAT", "float5"),
    ):
        yield Case("smddp-bench", ("all_gather", "--nproc", "2"), (2,), {setting: value})
        yield Case("smddp-bench", ("explain", "all_gather"), (2,), {setting: value})
        yield Case("smddp", ("info",), (1,), {setting: value})


def bench_lines() -> Iterator[Case]:
    """Yields wrong command lines of smddp-bench."""
    for words in (
        *((), ("",), ("all_gathers",), (NOT_UTF8,), ("--unknown",), ("all_gather", "--unknown"), ("all_gather", "x")),
        *(("all_gather", "-d", "float5"), ("all_reduce", "-o", "mean"), ("all_gather", "-b", "8T"), ("bw", "-m", "2")),
        *(("all_gather", "-b", "9", "-e", "8"), ("all_gather", "-g", "2"), ("all_gather", "-n", "0")),
        *(("sendrecv", "--nproc", "1"), ("hypercube", "--nproc", "3"), ("bw", "--nproc", "3"), ("all_gather", "-b")),
        *(("reduce", "--nproc", "2", "-r", "2"), ("reduce", "--nproc", "2", "-r", NOT_UTF8)),
        *(("all_gather", "--torch"), ("all_gather", "--torch="), ("all_gather", "--torch", "unknown", "--nproc", "2")),
        *(
            ("all_gather", "--plot"),
            ("all_gather", "--plot="),
            ("all_gather", "--plot", "x.txt"),
            ("all_gather", "--plot", "x"),
        ),
        *(
            ("simulate",),
            ("simulate", "x"),
            ("simulate", "sendrecv"),
            ("simulate", "all_gather", "--best", "--algorithm", "ring"),
        ),
        *(
            ("simulate", "all_gather", "--nodes", "0"),
            ("simulate", "broadcast", "--nodes", "2", "--ppn", "1", "--root", "2"),
        ),
        *(("simulate", "all_gather", "--plot", "x.png"), ("simulate", "all_gather", "--algorithm", "x")),
        *(
            ("explain",),
            ("explain", "x"),
            ("explain", "all_gather", "--draw", "x.png"),
            ("explain", "all_gather", "--unknown"),
        ),
        *(("compare",), ("compare", "x"), ("compare", "--unknown", "a", "b"), ("compare", "a", "b", "c")),
        *(
            ("replay",),
            ("replay", "--unknown"),
            ("replay", "--speed", "0", "x"),
            ("tune", "--unknown"),
            ("tune", "x"),
        ),
        *(("completion",), ("completion", "powershell"), ("man", "x"), ("man", NOT_UTF8), ("startup", "--unknown")),
    ):
        yield Case("smddp-bench", words)
    for number in NO_NUMBERS:
        yield from (
            Case("smddp-bench", ("all_gather", f"--{name}={number}")) for name in ("nproc", "minbytes", "timeout")
        )
        yield Case("smddp-bench", ("simulate", "all_gather", f"--nodes={number}"))
        yield Case("smddp-bench", ("explain", "all_gather", f"--bytes={number}"))
    for option in (
        "--timeout=nan",
        "--timeout=1e99",
        "-w=-1",
        "-c=x",
        "--nproc=0",
        "--nproc=9999999",
        "--json=",
        "-f=1",
    ):
        yield Case("smddp-bench", ("all_reduce", "--torch=gloo", option))
    for number in ("", "x", "nan", "-1", "0", NOT_UTF8):
        yield Case("smddp-bench", ("replay", "x", f"--speed={number}"))


def with_files(files: dict[str, Path]) -> Iterator[Case]:
    """Yields command lines with files that the program cannot read or use."""
    for name in UNUSABLE:
        path = str(files[name])
        yield Case("smddp", ("trace", path, "-o", "t.json"), (1,))
        yield Case("smddp-bench", ("compare", path, path), (1, 2))
        yield Case("smddp-bench", ("replay", path), (1, 2))
        yield Case("smddp-bench", ("simulate", "all_gather", "--cluster", path))
        yield Case("smddp", ("launch", "--dry-run", "--distribution", path, str(files["script"])))
        if name not in ("folder", "fifo", "missing", "inside-a-file", "device", "memory", "long-name", "long-path"):
            continue
        yield Case("smddp", ("launch", "--dry-run", path))
        yield Case("smddp", ("launch", "--dry-run", "--source-dir", path, "script.py"))
    for output in outputs(files):
        yield Case("smddp", ("trace", str(files["valid-dump"]), "-o", output))
        yield Case("smddp", ("doctor", "-n", "1", f"--svg={output}"))
        yield Case("smddp", ("status", NO_PROCESS, f"--dump={output}"), (1, 2))
        yield Case("smddp-bench", ("all_gather", "--nproc", "1", "-b", "8", "-e", "8", "-J", output), (1, 2))
        yield Case("smddp-bench", ("all_gather", "--nproc", "1", "-b", "8", "-e", "8", f"--plot={output}"))
        yield Case("smddp-bench", ("simulate", "all_gather", "--nodes", "2", f"--json={output}"), (1, 2))
        yield Case("smddp-bench", ("simulate", "all_gather", "--nodes", "2", f"--plot={output}"), (1, 2))
        yield Case("smddp-bench", ("explain", "all_gather", "--nodes", "2", f"--draw={output}"), (1, 2))
        if output != str(files["folder.svg"]):
            yield from (Case(program, ("man", f"--to={output}"), (1, 2)) for program in ("smddp", "smddp-bench"))
    for words in (
        *(
            ("--hosts", ","),
            ("--hosts", "a:0"),
            ("--hosts", "a:x"),
            ("--hosts", "-oProxyCommand=x"),
            ("--hosts", "a,a"),
        ),
        *(
            ("--hosts", NOT_UTF8),
            ("--ranks", "x"),
            ("--ranks", "0"),
            ("--ranks", "-1"),
            ("--port", "0"),
            ("--port", "x"),
        ),
        *(
            ("--port", "99999"),
            ("--distribution", "{"),
            ("--distribution", "[1]"),
            ("--distribution", "{}{}"),
            ("--input", "x"),
        ),
        *(("--distribution", '{"torch_distributed": 7}'), ("--distribution", '{"unknown": {}}'), ("--engine", "x")),
        *(
            ("--input", "=x"),
            ("--input", "train=/no/such"),
            ("--job-name", "../x"),
            ("--job-name", ""),
            ("--nodes", "2"),
        ),
        *(("--option", "x"), ("--option", "=x"), ("--instance-type", ""), ("--hosts", "a:1:2")),
        *(("--distribution", json.dumps({"mpi": {"enabled": "yes"}})), ("--interface", "a b"), ("--image", "\n")),
    ):
        yield Case("smddp", ("launch", "--dry-run", *words, str(files["script"])))
