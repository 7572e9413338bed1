"""Rank process: receives cases, runs each in a default group and answers with its error."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest

from ranks.group import init


class Task(NamedTuple):
    """A case for one rank.

    module, name: a function that runs in a separate group, or a case of `keeps_group`, which keeps the group of
    `members` open. store: file for a new group. members: number of the current set of ranks.
    """

    module: str
    name: str
    arguments: dict[str, Any]
    backend: str
    rank: int
    size: int
    store: str
    members: int


#: Error and reason of a skip.
Answer = tuple[str | None, str | None]


def serve(pipe: Connection) -> None:
    """Sends the rank once it is ready, then runs cases until the pipe closes. SIGUSR1 writes all stacks to stderr."""
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    import torch

    torch.set_num_threads(1)
    server = _Server()
    try:
        pipe.send(int(os.environ["RANK"]))
        while True:
            pipe.send(server.answer(pipe.recv()))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return


class _Server:
    def __init__(self) -> None:
        self._members: int | None = None

    def answer(self, task: Task) -> Answer:
        try:
            self._run(task)
        except pytest.skip.Exception as reason:
            return None, str(reason)
        except BaseException:
            return traceback.format_exc(), None
        return None, None

    def _run(self, task: Task) -> None:
        import torch
        import torch.distributed as dist

        os.environ.update(RANK=str(task.rank), WORLD_SIZE=str(task.size))
        function = getattr(importlib.import_module(task.module), task.name)
        lasting = hasattr(function, "case")
        if not lasting or self._members != task.members:
            if dist.is_initialized():
                dist.destroy_process_group()
            if not lasting:
                dist.set_debug_level(dist.DebugLevel.__members__[getattr(function, "debug_level", "OFF")])
            init(task.store, task.rank, task.size, backend=task.backend)
        self._members = task.members if lasting else None
        torch.manual_seed(0)
        (function.case if lasting else function)(**task.arguments)
        # A case may have destroyed its group.
        if not lasting and dist.is_initialized():
            dist.destroy_process_group()
