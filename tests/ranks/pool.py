"""Pools of rank processes that run many cases, one after another."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ranks import process
from ranks.group import BACKEND
from ranks.serving import Task, serve

CASE_SECONDS = 60.0
# Time for the other ranks after one rank failed.
_AFTER_FAILURE = 15.0
# Time for all ranks to import torch at once on a machine with two cores.
START_SECONDS = 200.0


class RankProcesses:
    """Sends cases to rank processes and collects their answers. Subclasses start and end the processes.

    A failed case ends the processes, since the state of their group is unknown. `_pipes`, `_pids`: by process number.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.directory = Path(tempfile.mkdtemp(prefix="smddp-ranks-"))
        self._pipes: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._cases = self._sets = 0
        self._members: Sequence[int] = ()

    def start(self) -> None:
        """Starts the processes unless they run."""

    def close(self, kill: bool = False) -> None:
        """Ends the processes: by closing their pipes, or at once."""
        raise NotImplementedError

    def run_on(self, members: Sequence[int], module: str, name: str, seconds: float, **arguments: Any) -> None:
        """Runs a case on some of the processes. Raises AssertionError with the ranks' errors; skips if all skipped."""
        if errors := self.ask_on(members, module, name, seconds, **arguments):
            self.close(kill=True)
            raise AssertionError(f"{module}.{name} on {len(members)} ranks of {self.backend}:\n{_merged(errors)}")

    def ask_on(
        self, members: Sequence[int], module: str, name: str, seconds: float, **arguments: Any
    ) -> dict[int, str]:
        """Runs a case on some of the processes. Returns the errors by rank; skips if all skipped."""
        try:
            self.start()
            errors, skipped = self._collect(members, module, name, seconds, arguments)
        except BaseException:
            # For example pytest's time limit: late answers would be mistaken for those of the next case.
            self.close(kill=True)
            raise
        if skipped and not errors:
            assert len(skipped) == len(members), f"only {len(skipped)} of {len(members)} ranks skipped: {skipped}"
            pytest.skip(skipped[0])
        return errors

    def _collect(
        self, members: Sequence[int], module: str, name: str, seconds: float, arguments: dict[str, Any]
    ) -> tuple[dict[int, str], list[str]]:
        self._cases += 1
        if members != self._members:
            self._members, self._sets = members, self._sets + 1
        store = str(self.directory / f"store{self._cases}")
        with contextlib.suppress(BrokenPipeError):
            for rank, member in enumerate(members):
                task = Task(module, name, arguments, self.backend, rank, len(members), store, self._sets)
                self._pipes[member].send(task)
        errors: dict[int, str] = {}
        skipped: list[str] = []
        waiting = {self._pipes[member]: rank for rank, member in enumerate(members)}
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    error, reason = pipe.recv()  # type: ignore[union-attr]
                    if reason is not None:
                        skipped.append(reason)
                except (EOFError, ConnectionResetError):
                    error = self._ended(members[rank])
                if error:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
        for rank in waiting.values():
            errors[rank] = f"no answer in time; its stacks:\n{self._stacks(members[rank])}"
        return errors, skipped

    def log(self, member: int) -> Path:
        """Returns the file with the output of one process."""
        return self.directory / f"rank{member}.log"

    def _tail(self, member: int) -> str:
        return self.log(member).read_text(errors="replace")[-6000:] if self.log(member).exists() else ""

    def _ended(self, member: int) -> str:
        return f"ended\n{self._tail(member)}"

    def _stacks(self, member: int) -> str:
        before = self.log(member).stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[member], signal.SIGUSR1)
        # faulthandler does not report completion, so wait for the file to grow.
        deadline = time.monotonic() + 2
        while self.log(member).stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._tail(member)


def _merged(errors: dict[int, str]) -> str:
    """Joins the errors of all ranks; equal errors of several ranks appear once."""
    by_text: dict[str, list[int]] = {}
    for rank, error in sorted(errors.items()):
        by_text.setdefault(error, []).append(rank)
    return "\n".join(f"--- rank {', '.join(map(str, ranks))}\n{error}" for error, ranks in by_text.items())


class Pool(RankProcesses):
    """`size` processes on this machine, started by the first case and again after a failed one.

    environment: variables of each rank. prepare: "module:function" that a rank calls before its first case.
    path: folder from which the cases' modules are imported.
    """

    def __init__(
        self,
        size: int,
        environment: Callable[[int], dict[str, str]] = lambda rank: {},
        prepare: str | None = None,
        *,
        backend: str = BACKEND,
        path: str | None = None,
    ) -> None:
        super().__init__(backend)
        self.size, self._environment, self._arguments = size, environment, (prepare, path)
        self._processes: list[Any] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        if self._processes:
            return
        self.directory.mkdir(exist_ok=True)
        self._members = ()
        for rank in range(self.size):
            own = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "LOCAL_RANK": str(rank)}
            variables = {"OMP_NUM_THREADS": "1", **os.environ, **self._environment(rank), **own}
            each, self._pipes[rank] = process.start(
                _rank_main, *self._arguments, environment=variables, logs=[str(self.log(rank))]
            )
            self._processes.append(each)
            self._pids[rank] = each.pid
        # The start does not count against the time of the first case, nor against the group's timeout.
        until = time.monotonic() + START_SECONDS
        for rank, pipe in self._pipes.items():
            if not pipe.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(f"rank {rank} did not start within {START_SECONDS} s:\n{self._tail(rank)}")
            with contextlib.suppress(EOFError, ConnectionResetError):  # the first case reports its end
                pipe.recv()

    def run(self, module: str, name: str, seconds: float = CASE_SECONDS, **arguments: Any) -> None:
        """Runs a case on all ranks; see `run_on`."""
        self.run_on(range(self.size), module, name, seconds, **arguments)

    def ask(self, module: str, name: str, seconds: float = CASE_SECONDS) -> dict[int, str]:
        """Runs a case on all ranks; see `ask_on`."""
        return self.ask_on(range(self.size), module, name, seconds)

    def _ended(self, member: int) -> str:
        self._processes[member].join(5)
        return f"ended with status {self._processes[member].exitcode}\n{self._tail(member)}"

    def output(self) -> str:
        """Returns the output of all ranks since their start; "" after a failed case, which removes it."""
        logs = [self.log(rank) for rank in range(self.size)]
        return "\n".join(log.read_text(errors="replace") for log in logs if log.exists())

    def close(self, kill: bool = False) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for each in self._processes:
            if not kill:
                each.join(20)
            each.kill()
            each.join()
        self._processes = []
        shutil.rmtree(self.directory, ignore_errors=True)


def client_pool(size: int, path: str | Path, backend: str = BACKEND, **options: Any) -> Pool:
    """Returns a pool for cases of the folder `path` that use DTensor, with its faster placement search."""
    return Pool(size, prepare="ranks.own_placements:install", backend=backend, path=str(path), **options)


class Pools:
    """Pools by key, for example the number of ranks. Each is made when first needed."""

    def __init__(self, make: Callable[[Any], Pool] = Pool) -> None:
        self._make = make
        self._pools: dict[Any, Pool] = {}

    def of(self, key: Any) -> Pool:
        if key not in self._pools:
            self._pools[key] = self._make(key)
        return self._pools[key]

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()


def _rank_main(pipe: Connection, prepare: str | None, path: str | None) -> None:
    if path is not None:
        sys.path.insert(0, path)
    if prepare is not None:
        module, function = prepare.split(":")
        getattr(importlib.import_module(module), function)()
    serve(pipe)
