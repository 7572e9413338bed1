"""A signal handler calls the group whose call it interrupts: both calls complete, or raise by their deadlines."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import smddp
import torch
import torch.distributed as dist
from ranks import forked
from ranks.cases import on_ranks

LIMIT = 0.8
# Enough for a loaded machine, and well below the 10 s of the leave timeout.
SLACK = 4.0

RETURNS, LATE, CLOSED, EXITS = "returns", "CollectiveTimeoutError", "ClosedError", "SystemExit"


def destroy_and_exit(group: Any) -> None:
    dist.destroy_process_group(group)
    sys.exit(7)


def ones() -> torch.Tensor:
    return torch.ones(4)


NESTED: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "destroy": (dist.destroy_process_group, [RETURNS, CLOSED]),
    "exit": (destroy_and_exit, [EXITS]),
    "all_reduce": (lambda group: dist.all_reduce(ones(), group=group), [LATE, LATE]),
    "barrier": (lambda group: dist.barrier(group), [LATE, LATE]),
    "send": (lambda group: dist.send(ones(), 1, group), [RETURNS, LATE]),
    "recv": (lambda group: dist.recv(ones(), 1, group), [LATE, LATE]),
    "numpy close": (lambda group: group.close(), [RETURNS, CLOSED]),
    "numpy all_reduce": (lambda group: group.all_reduce(ones().numpy(), timeout=LIMIT), [LATE, LATE]),
}
WAITS: dict[str, Callable[[Any], object]] = {
    "all_reduce": lambda group: dist.all_reduce(ones(), group=group),
    "work": lambda group: dist.all_reduce(ones(), group=group, async_op=True).wait(),
    "recv": lambda group: dist.recv(ones(), 1, group),
    "numpy": lambda group: group.all_reduce(ones().numpy(), timeout=LIMIT),
}
CASES = [
    *itertools.product(["destroy", "exit"], ["all_reduce", "work", "recv"]),
    *zip(["all_reduce", "barrier", "send", "recv"], ["all_reduce", "work", "recv", "all_reduce"], strict=True),
    *itertools.product(["numpy close", "numpy all_reduce"], ["numpy"]),
]


def outcome(call: Callable[[Any], object], group: Any) -> str:
    """Makes a call. Returns the name of its exception, or RETURNS."""
    try:
        call(group)
    except (smddp.Error, SystemExit) as error:
        return type(error).__name__
    except ValueError as error:
        # torch logs a failed call, and raises for a group that the handler has destroyed.
        return type(error.__context__).__name__
    return RETURNS


def interrupt(nested: str, wait: str, group: Any) -> None:
    """Waits in a call that the other rank does not make, while a handler makes the nested call."""
    call, expected = NESTED[nested]
    seen = []

    def handler(*_: object) -> None:
        if nested == "exit":
            call(group)
        seen.append(outcome(call, group))

    before = signal.signal(signal.SIGTERM, handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    begun = time.monotonic()
    timer.start()
    try:
        seen.append(outcome(WAITS[wait], group))
    finally:
        timer.join()
        signal.signal(signal.SIGTERM, before)
    assert seen == expected, (nested, wait, seen)
    assert time.monotonic() - begun < LIMIT + SLACK, (nested, wait, time.monotonic() - begun)


@on_ranks(2)
def test_a_handler_may_call_the_group_whose_call_it_interrupts() -> None:
    store = dist.distributed_c10d._get_default_store()
    for nested, wait in CASES:
        name = f"{nested} in {wait}"
        if wait == "numpy":
            group: Any = smddp.init(dist.get_rank(), 2, store=dist.PrefixStore(name, store))
            leave: Callable[[Any], object] = smddp.Communicator.close
        else:
            group, leave = dist.new_group([0, 1]), dist.destroy_process_group
            group._set_default_timeout(timedelta(seconds=LIMIT))
        if dist.get_rank() == 0:
            interrupt(nested, wait, group)
            store.set(name, "")
        else:
            # Waits outside of the group's calls.
            store.wait([name])
        with contextlib.suppress(smddp.Error, ValueError):
            leave(group)
    dist.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [2.0, 2.0]


PROGRAM = """
import os, signal, sys, threading
import torch, torch.distributed as dist
rank, store = int(os.environ["RANK"]), dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("smddp", store=store, rank=rank, world_size=2)
dist.new_group([0, 1])

def stop(*_):
    dist.destroy_process_group()
    sys.exit(7)

if rank == 0:
    signal.signal(signal.SIGTERM, stop)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    dist.all_reduce(torch.ones(4)) if rank == 0 else store.wait(["never"])
finally:
    store.set("never", "") if rank == 0 else None
"""


def test_a_handler_that_destroys_all_groups_and_exits_ends_the_process_with_its_code(tmp_path):
    places = [{"RANK": str(rank), "STORE": f"{tmp_path}/store"} for rank in range(2)]
    done = forked.run_all([(PROGRAM, each) for each in places], seconds=9)
    assert done[0].returncode == 7, done
