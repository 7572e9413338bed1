"""Runs command lines of the Python programs, each in a process forked from this one, which has imported them.

Reads a list of cases from standard input as JSON, {"program", "words", "folder", "environment"}, and writes the list of
{"status", "stdout", "stderr"} to standard output. A case that exceeds its time limit ends by SIGALRM: status -14.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import smddp.observability.info
import torch.distributed
from smddp import _native
from smddp.estimator import shell
from smddp.launch import programs
from smddp.observability import status_table, trace
from smddp.tools import bench_torch, cli, pages
from smddp.tools.doctor import command

with contextlib.suppress(ImportError):
    importlib.import_module("matplotlib.backends.backend_agg")

#: Imported once: the programs import them on first use.
_PRELOADED = (
    *(_native.core(), torch.distributed, smddp.observability.info, status_table, trace),
    *(bench_torch, shell, pages, command),
)
PROGRAMS: Mapping[str, Callable[[], int]] = {
    "smddp": cli.main,
    "smddp-bench": cli.bench,
    "smddprun": programs.smddprun,
    "smddpmprun": programs.smddpmprun,
    "smddpsinglenode": programs.smddpsinglenode,
}
#: Seconds of one command on a busy machine.
LIMIT = 30


def _become(case: Mapping[str, Any], stdout: int, stderr: int) -> None:
    """Runs a case in this process, as the interpreter runs a console script, and ends the process."""
    os.setsid()
    signal.alarm(LIMIT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(case["folder"])
    os.environ.update(case["environment"])
    sys.argv = [case["program"], *case["words"]]
    status: Any = 1
    try:
        status = PROGRAMS[case["program"]]()
    except SystemExit as leave:
        status = leave.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status or 0)


def run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Returns status and output of a case. Ends the processes that it started."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        pid = os.fork()
        if pid == 0:
            _become(case, stdout.fileno(), stderr.fileno())
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        found: dict[str, Any] = {"status": os.waitstatus_to_exitcode(status)}
        for name, file in (("stdout", stdout), ("stderr", stderr)):
            file.seek(0)
            found[name] = file.read(1 << 20).decode(errors="replace")
    return found


if __name__ == "__main__":
    # A collection in a forked process would copy the pages of all objects.
    gc.freeze()
    print(json.dumps([run(case) for case in json.load(sys.stdin)]))
