"""Calls of several operations: an exception on one rank between two of them ends the call of the other ranks."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

# Exceptions that a signal handler may raise; the first three have the classes of the library's own errors.
RAISED = [ValueError, smddp.Error, smddp.CollectiveTimeoutError, RuntimeError, KeyboardInterrupt]


def tensors(scale: int = 1) -> list[torch.Tensor]:
    return [torch.ones(scale * count) for count in (4, 3)]


def parts(group: Any) -> dict[str, Callable[[], object]]:
    """All calls of torch's interface that are made of several operations of the core."""
    return {
        "sparse all_reduce": lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        "all_reduce_coalesced": lambda: group.allreduce_coalesced(tensors()),
        "all_gather_coalesced": lambda: group.allgather_coalesced([tensors(), tensors()], tensors()),
        "all_gather_into_tensor_coalesced": lambda: group.allgather_into_tensor_coalesced(tensors(2), tensors()),
        "reduce_scatter_tensor_coalesced": lambda: group.reduce_scatter_tensor_coalesced(tensors(), tensors(2)),
    }


class Raising:
    """A communicator whose second collective raises instead."""

    def __init__(self, comm: Any, error: type[BaseException]) -> None:
        self._comm = comm
        self._error = error
        self._calls = 0

    def collective(self, *arguments: Any, **named: Any) -> Any:
        self._calls += 1
        if self._calls == 2:
            raise self._error("raised by a signal handler")
        return self._comm.collective(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


@on_ranks(2)
def test_an_exception_between_two_operations_ends_the_call_of_the_other_rank() -> None:
    for name in parts(None):
        for error in RAISED:
            group = dist.new_group(timeout=timedelta(seconds=20))
            call = parts(group)[name]
            if dist.get_rank() == 0:
                group._comm = Raising(group._comm, error)
                with pytest.raises(error, match="raised by a signal handler"):
                    call()
            else:
                with pytest.raises(smddp.ClosedError, match=rf"rank 0 left a .* \({error.__name__}\)"):
                    work = call()
                    if work is not None:
                        work.wait()  # type: ignore[attr-defined]
            dist.barrier()


@on_ranks(2)
def test_an_error_of_all_ranks_leaves_the_group_usable() -> None:
    group = dist.new_group()
    with pytest.raises(ValueError, match="differ from"):
        dist.all_reduce(torch.eye(2 + dist.get_rank()).to_sparse(), group=group)
    dist.all_reduce(total := torch.ones(1), group=group)
    assert total.item() == 2.0


class Stopped(ValueError):
    """Raised by a signal handler."""


def stop(*_: object) -> None:
    raise Stopped


WITHOUT_TORCH: dict[str, Callable[[smddp.Communicator], object]] = {
    "broadcast_object": lambda group: group.broadcast_object("text", root=1),
    "all_gather_object": lambda group: group.all_gather_object("text"),
    "split": lambda group: group.split(0),
}


def in_first_part(call: Callable[[], object]) -> None:
    """Makes the call, which the other rank has not made, and has a signal handler raise in it."""
    before = signal.signal(signal.SIGUSR2, stop)
    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGUSR2])
    timer.start()
    try:
        with pytest.raises(Stopped):
            call()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


@on_ranks(2)
def test_a_signal_in_a_call_of_several_operations_ends_the_call_of_the_other_rank() -> None:
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    for name, call in WITHOUT_TORCH.items():
        group = smddp.init(rank, 2, store=dist.PrefixStore(name, store), timeout=20)
        if rank == 0:
            in_first_part(functools.partial(call, group))
            store.set(f"left {name}", "")
        else:
            store.wait([f"left {name}"])
            with pytest.raises(smddp.ClosedError, match=f"rank 0 left {name} before its end"):
                call(group)
        group.close()
    world = dist.new_group()
    if rank == 0:
        in_first_part(lambda: world.monitored_barrier(timedelta(seconds=20)))
        store.set("left barrier", "")
    else:
        store.wait(["left barrier"])
        with pytest.raises(RuntimeError, match=re.escape("rank 0 left the call (Stopped)")):
            world.monitored_barrier(timedelta(seconds=20))
    dist.barrier()
