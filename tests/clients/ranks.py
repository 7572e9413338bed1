"""A pool of rank processes that runs many cases, one after another, without a restart.

Each case gets a fresh default group (so making and destroying groups in one process is exercised all
the time) and a time limit. When a rank hangs or dies, all ranks' Python stacks go into the error and
the pool is thrown away; the next case starts a new one.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
BACKEND = os.environ.get("SMDDP_TEST_BACKEND", "smddp")
# Below the case's limit, so that a stuck collective reports itself before the pool is killed.
_GROUP_SECONDS = 40
# Ranks import torch all at once, on a machine with two cores.
_START_SECONDS = 200.0
# Start message of a rank. Received in place of a case's result, it reports a slow start.
_READY = "took too long to start"
_STACK_SECONDS = 2.0
_LOG_TAIL = 6000
_PR_SET_PDEATHSIG = 1


def case_names(directory: str) -> list[tuple[str, str]]:
    """(module, function) of every function `case_*` of the modules in ``directory``.

    Read from the source, so that collecting imports no torch.
    """
    found = []
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py") and name != "__init__.py":
            with open(os.path.join(directory, name)) as source:
                tree = ast.parse(source.read())
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            found += [(name[:-3], n) for n in names if n.startswith("case_")]
    return found


class CaseFailed(AssertionError):
    """A case failed; the text holds each rank's traceback or the stack it was found in."""


def _worker(rank: int, world_size: int, backend: str, log: str, path: str, environment: dict, commands) -> None:
    """One rank: waits for cases, found from ``path``, on ``commands`` until it closes."""
    # Not a daemon in multiprocessing's sense, since those may not have data loader workers; this
    # ends the rank with its parent instead.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable(file=fd)
    faulthandler.register(signal.SIGUSR1, file=fd, all_threads=True)
    sys.path.insert(0, path)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import own_placements
    import torch

    torch.set_num_threads(1)
    own_placements.install()
    commands.send(_READY)
    while True:
        try:
            module, function, rendezvous, arguments = commands.recv()
        except EOFError:
            return
        error = perform(rank, world_size, backend, module, function, rendezvous, arguments)
        commands.send(error)
        if error is not None:
            # The group is in an unknown state: the parent replaces the pool.
            return


def perform(
    rank: int, world_size: int, backend: str, module: str, function: str, rendezvous: str, arguments: dict
) -> str | None:
    """Runs one case on this rank in a new default group. Returns its error."""
    import torch
    import torch.distributed as dist

    try:
        case = getattr(importlib.import_module(module), function)
        dist.set_debug_level(dist.DebugLevel.__members__[getattr(case, "debug_level", "OFF")])
        dist.init_process_group(
            backend,
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=_GROUP_SECONDS),
        )
        torch.manual_seed(0)
        case(**arguments)
        if dist.is_initialized():  # a case may have ended it
            dist.destroy_process_group()
    except BaseException:
        return traceback.format_exc()
    return None


def _merge(errors: dict[int, str]) -> str:
    """Joins all ranks' errors; equal errors of several ranks appear once."""
    by_text: dict[str, list[int]] = {}
    for rank, error in sorted(errors.items()):
        by_text.setdefault(error, []).append(rank)
    return "\n".join(f"--- rank {', '.join(map(str, ranks))}\n{error}" for error, ranks in by_text.items())


class Ranks:
    """``world_size`` rank processes of one backend.

    The cases' modules are imported from the directory ``path``; ``environments`` holds variables for each rank.
    """

    def __init__(
        self, world_size: int = 4, backend: str = BACKEND, path: str = HERE, environments: list[dict] | None = None
    ) -> None:
        self.world_size = world_size
        self.backend = backend
        self._path = path
        self._environments = environments or [{}] * world_size
        self._processes: list = []
        self._pipes: list = []
        self._directory: str | None = None
        self._cases = 0

    def _start(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="ranks-")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # The fork server keeps the environment of its start.
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            mine, theirs = context.Pipe()
            log, environment = self._log(rank), {**os.environ, **self._environments[rank]}
            arguments = (rank, self.world_size, self.backend, log, self._path, environment, theirs)
            process = context.Process(target=_worker, args=arguments)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        # Start-up does not count for the first case. Sending the case detects ranks that have ended.
        until = time.monotonic() + _START_SECONDS
        for pipe in self._pipes:
            with contextlib.suppress(EOFError, ConnectionResetError):
                if pipe.poll(max(0.0, until - time.monotonic())):
                    pipe.recv()

    def _log(self, rank: int) -> str:
        return os.path.join(self._directory, f"rank{rank}.log")

    def run(self, module: str, function: str, seconds: float = 60.0, **arguments) -> None:
        """Runs ``module.function(**arguments)`` on every rank; raises `CaseFailed` unless all return."""
        try:
            errors = self._errors(module, function, seconds, arguments)
        except BaseException:
            # Such as pytest's time limit: late results would be mistaken for those of the next case.
            self.close(kill=True)
            raise
        if errors:
            self.close(kill=True)
            raise CaseFailed(f"{module}.{function} on {self.world_size} ranks of {self.backend}:\n{_merge(errors)}")

    def _errors(self, module: str, function: str, seconds: float, arguments: dict) -> dict[int, str]:
        """Returns the errors of one case by rank; {} if all ranks pass."""
        if not self._processes:
            self._start()
        self._cases += 1
        rendezvous = os.path.join(self._directory, f"store{self._cases}")
        with contextlib.suppress(BrokenPipeError):
            for pipe in self._pipes:
                pipe.send((module, function, rendezvous, arguments))
        waiting = dict(zip(self._pipes, range(self.world_size)))
        errors: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(list(waiting), deadline - time.monotonic()):
                rank = waiting.pop(pipe)
                try:
                    error = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(_STACK_SECONDS)
                    error = f"ended with status {self._processes[rank].exitcode}\n{self._tail(rank)}"
                if error is not None:
                    errors[rank] = error
                    # The other ranks may now wait for this rank: give them a moment to report it.
                    deadline = min(deadline, time.monotonic() + 10.0)
        for rank in waiting.values():
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if waiting:
            time.sleep(0.3)  # faulthandler does not signal completion
        for rank in waiting.values():
            errors[rank] = f"no answer in time; its stacks:\n{self._tail(rank)}"
        return errors

    def _tail(self, rank: int) -> str:
        with contextlib.suppress(OSError), open(self._log(rank), errors="replace") as text:
            return text.read()[-_LOG_TAIL:]
        return ""

    def close(self, kill: bool = False) -> None:
        """Ends the ranks: by closing their pipes, or at once."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self._processes:
            if not kill:
                process.join(20)
            if process.is_alive():
                process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
