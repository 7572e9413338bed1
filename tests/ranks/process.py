"""Start of one process with a pipe to this one."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Sends this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def redirect(*paths: str) -> None:
    """Appends standard output and standard error to files: to one file, or to one each."""
    for stream, path in ((1, paths[0]), (2, paths[-1])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)


def start(
    target: Callable[..., None],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    logs: Sequence[str] = (),
    method: str = "forkserver",
    daemon: bool = False,
) -> tuple[BaseProcess, Connection]:
    """Starts `target(pipe, *arguments)` in a process that ends with its parent. Returns the process and its pipe.

    environment: variables besides those of this process. logs: files for the output, see `redirect`.
    method: "forkserver" forks from the server that has imported torch (conftest.py), "fork" from this process.
    daemon: the process ends with this one, and may have no children.
    """
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    # The fork server keeps the environment of its start.
    variables = {**os.environ, **(environment or {})}
    process = context.Process(target=_main, args=(target, theirs, arguments, variables, logs), daemon=daemon)
    process.start()
    theirs.close()
    return process, ours


def _main(
    target: Callable[..., None], pipe: Connection, arguments: tuple, environment: dict[str, str], logs: Sequence[str]
) -> None:
    die_with_parent()
    if logs:
        redirect(*logs)
    os.environ.clear()
    os.environ.update(environment)
    target(pipe, *arguments)
