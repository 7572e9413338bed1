"""Rank processes that are started once and run many cases.

A case is a function that every rank runs with a group of all ranks. `on_ranks` turns it into a pytest test for each
group size. A case that raises fails its test with every rank's traceback; hanging ranks dump their stacks, and the pool
is restarted.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BACKEND = os.environ.get("SMDDP_TEST_BACKEND", "smddp")
# Timeout of the groups; below the limit of a case, so that the group's error is reported.
GROUP_SECONDS = 30.0
CASE_SECONDS = 60.0
# Time for the other ranks after one rank failed.
_AFTER_FAILURE = 15.0
# Time for all ranks to import torch at once on a machine with two cores.
_START_SECONDS = 200.0

# Tests of properties that only ranks of one node have, and the reason.
ONE_NODE = {
    "test_the_profiler_shows_sizes_and_path_of_every_call": "the path is not shared memory",
    "test_collectives_read_symmetric_memory_and_return_it_after_each_call": "a rank alone on its node has no readers",
    "test_fsdp2_allocates_its_buffers_in_symmetric_memory": "a rank alone on its node has no readers",
}

Case = Callable[[], None]


def on_ranks(*sizes: int, seconds: float = CASE_SECONDS) -> Callable[[Case], Any]:
    """Decorator: runs the function on each rank of a group, for each of the sizes."""

    def wrap(case: Case) -> Any:
        @pytest.mark.parametrize("size", sizes)
        def test(size: int, pools: Pools) -> None:
            pools.of(size).run(case.__module__, case.__name__, seconds)

        test.__name__ = case.__name__
        test.__doc__ = case.__doc__
        test.case = case
        test.sizes = sizes
        test.seconds = seconds
        return test

    return wrap


def all_cases() -> Iterator[tuple[str, str, Any]]:
    """Yields module, name and test of this folder's tests made by `on_ranks`."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        try:
            module = importlib.import_module(f"backend.{file.stem}")
        except pytest.skip.Exception:
            continue  # not for this torch
        for name, test in vars(module).items():
            if hasattr(test, "case") and hasattr(test, "sizes"):
                yield module.__name__, name, test


def ask(
    pipes: dict[int, Any],
    messages: dict[int, Any],
    seconds: float,
    ended: Callable[[int], str],
    stacks: Callable[[int], str],
) -> dict[int, str]:
    """Sends every rank its message and collects the answers of `run_case`. Returns the errors by rank.

    ended: describes a rank whose pipe closed; stacks: returns the stacks of a rank that does not answer.
    Skips the test if all ranks skipped it.
    """
    with contextlib.suppress(BrokenPipeError):
        for rank, pipe in pipes.items():
            pipe.send(messages[rank])
    errors: dict[int, str] = {}
    skipped: list[str] = []
    waiting = {pipe: rank for rank, pipe in pipes.items()}
    deadline = time.monotonic() + seconds
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in multiprocessing.connection.wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                error, reason = pipe.recv()
                if reason is not None:
                    skipped.append(reason)
            except (EOFError, ConnectionResetError):
                error = ended(rank)
            if error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
    for rank in waiting.values():
        errors[rank] = f"does not answer; its stacks:\n{stacks(rank)}"
    if skipped and not errors:
        assert len(skipped) == len(pipes), f"only {len(skipped)} of {len(pipes)} ranks skipped: {skipped}"
        pytest.skip(skipped[0])
    return errors


def error_text(errors: dict[int, str], size: int) -> str:
    """Returns the errors of all ranks as one text."""
    return "\n".join(f"--- rank {rank} of {size}\n{errors[rank]}" for rank in sorted(errors))


def run_case(module: str, name: str) -> tuple[str | None, str | None]:
    """Runs one case in a rank. Returns its error and the reason of a skip."""
    import torch

    try:
        torch.manual_seed(0)
        getattr(importlib.import_module(module), name).case()
    except pytest.skip.Exception as reason:
        return None, str(reason)
    except BaseException:
        return traceback.format_exc(), None
    return None, None


class Pools:
    """One pool of ranks for each size, started when first needed."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def of(self, size: int) -> Pool:
        if size not in self._pools:
            self._pools[size] = Pool(size)
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


class Pool:
    """`size` processes with a group of backend smddp, restarted after a failed case.

    environment: variables of each rank. prepare: "module:function" that a rank calls before it makes the group.
    """

    def __init__(
        self, size: int, environment: Callable[[int], dict[str, str]] | None = None, prepare: str | None = None
    ) -> None:
        self.size = size
        self._environment = environment
        self._prepare = prepare
        self._start()

    def _start(self) -> None:
        self._alive = True
        self._directory = Path(tempfile.mkdtemp(prefix="smddp-ranks-"))
        # The fork server keeps the environment of its start.
        context = multiprocessing.get_context("forkserver")
        self._pipes = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            variables = {**os.environ, **(self._environment(rank) if self._environment else {})}
            arguments = (rank, self.size, str(self._directory), theirs, variables, self._prepare)
            process = context.Process(target=_rank_main, args=arguments, daemon=False)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # The ranks are ready before the first case, so their start does not count against the group's timeout.
        self._must(self._send("are you there?", _START_SECONDS))

    def run(self, module: str, name: str, seconds: float) -> None:
        """Runs one case. Raises AssertionError with the ranks' errors; skips if all ranks skipped."""
        self._must(self.ask(module, name, seconds))

    def ask(self, module: str, name: str, seconds: float) -> dict[int, str]:
        """Runs one case. Returns the errors by rank."""
        if not self._alive:
            self._start()
        return self._send((module, name), seconds)

    def _send(self, message: Any, seconds: float) -> dict[int, str]:
        pipes = dict(enumerate(self._pipes))
        return ask(pipes, dict.fromkeys(pipes, message), seconds, self._ended, self._stacks)

    def _must(self, errors: dict[int, str]) -> None:
        if errors:
            self.close()
            raise AssertionError(error_text(errors, self.size))

    def _ended(self, rank: int) -> str:
        self._processes[rank].join(5)
        return f"ended with status {self._processes[rank].exitcode}\n{self._log(rank)}"

    def _stacks(self, rank: int) -> str:
        log = self._directory / f"rank{rank}.log"
        before = log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        # faulthandler does not report completion, so wait for the file to grow.
        deadline = time.monotonic() + 2
        while log.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._log(rank)

    def output(self) -> str:
        """Returns the output of all ranks until now."""
        return "\n".join((self._directory / f"rank{rank}.log").read_text(errors="replace") for rank in range(self.size))

    def _log(self, rank: int) -> str:
        return (self._directory / f"rank{rank}.log").read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """Ends the ranks: closes their pipes, then kills the remaining processes."""
        self._alive = False
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    rank: int, size: int, directory: str, pipe: Any, environment: dict[str, str], prepare: str | None
) -> None:
    log = os.open(f"{directory}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    if prepare is not None:
        module, function = prepare.split(":")
        getattr(importlib.import_module(module), function)()
    pipe.recv()
    pipe.send((None, None))
    made = False
    while True:
        try:
            module, name = pipe.recv()
        except EOFError:
            return
        if not made:
            init(f"{directory}/store", rank, size)
            made = True
        pipe.send(run_case(module, name))


def init(store: str, rank: int, size: int, **options: Any) -> None:
    """Creates the default group over a file store."""
    import torch.distributed as dist
    from smddp._register import register

    register()
    options.setdefault("backend", BACKEND)
    options.setdefault("timeout", datetime.timedelta(seconds=GROUP_SECONDS))
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=size, **options)


def again(**options: Any) -> None:
    """Destroys the default group and creates it again with `options`."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    name: list[Any] = [tempfile.mktemp(prefix="smddp-store-")]
    dist.broadcast_object_list(name, src=0)
    dist.destroy_process_group()
    init(name[0], rank, size, **options)
