"""Runs code in processes that are forked from the server that has torch (conftest.py).

Importing it again takes seconds and proves nothing there. What is about a process's very first import
of torch needs a Python of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """As of `subprocess.run`."""

    returncode: int
    stdout: str
    stderr: str


def run(code: str, **environment: str) -> Done:
    """`python -c code` with these variables besides our own."""
    (done,) = run_all([(code, environment)])
    return done


def run_all(programs: list[tuple[str, dict[str, str]]], seconds: float = 120) -> list[Done]:
    """All at the same time. Those that do not end within `seconds` are killed."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="smddp-forked-") as place:
        children = []
        for number, (code, environment) in enumerate(programs):
            said = [os.path.join(place, f"{number}.{stream}") for stream in ("out", "err")]
            child = context.Process(target=_main, args=(code, {**os.environ, **environment}, *said))
            child.start()
            children.append((child, said))
        ended = []
        for child, said in children:
            child.join(seconds)
            if child.is_alive():
                child.kill()
                child.join()
            ended.append(Done(child.exitcode, *(_text(path) for path in said)))
    return ended


def _text(path: str) -> str:
    with contextlib.suppress(FileNotFoundError), open(path, errors="replace") as file:
        return file.read()
    return ""


def _main(code: str, environment: dict[str, str], out: str, err: str) -> None:
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
