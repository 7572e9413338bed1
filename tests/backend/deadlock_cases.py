"""Deadlocks and matching calls for `test_deadlock`: each case runs on all ranks of a pool."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import random
import re
import signal
import threading
import time

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import keeps_group

#: Seconds from the last wait of a cycle to the errors, on a machine that is busy with other tests.
LIMIT = 10.0
#: Time limit of the calls. Messages whose deadline is less than 60 s away form no cycle.
DEADLINE = datetime.timedelta(seconds=150)
#: Kinds of waits, and their forms.
KINDS = ("all_reduce", "barrier", "all_to_all", "broadcast", "recv", "send", "mixed")
FORMS = ("blocking", "async")
#: Elements of a message that waits for its recv.
LARGE = 4 << 20
_HERE = os.path.basename(__file__)


def wait_for(kind: str, form: str, peer: int, group: dist.ProcessGroup) -> None:
    """Waits for global rank `peer` in a group of two or more ranks."""
    rank, size = dist.get_rank(), group.size()
    is_async = form == "async"
    tensor = torch.ones(LARGE if kind == "send" else 4 * size)
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group, async_op=is_async),
        "barrier": lambda: dist.barrier(group, async_op=is_async),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor, group=group, async_op=is_async),
        "broadcast": lambda: dist.broadcast(tensor, src=peer, group=group, async_op=is_async),
        "recv": lambda: dist.irecv(tensor, src=peer, group=group) if is_async else dist.recv(tensor, peer, group),
        "send": lambda: dist.isend(tensor, dst=peer, group=group) if is_async else dist.send(tensor, peer, group),
    }
    work = calls[kind]()
    if is_async:
        work.wait()
    assert rank != peer


def cycle(size: int, groups: int, kind: str, form: str) -> list[tuple[str, str, list[int]]]:
    """Returns kind, form and ranks of the group in which rank i waits for rank i + 1. Collectives use pairs of ranks.

    Messages use `groups` groups of all ranks.
    """
    kinds = itertools.cycle(KINDS[:-1]) if kind == "mixed" else itertools.repeat(kind)
    waits = []
    for rank, of in zip(range(size), kinds, strict=False):
        is_message = of in ("send", "recv") or rank >= groups
        own = of if not is_message or of in ("send", "recv") else "recv"
        ranks = list(range(size)) if is_message else sorted((rank, (rank + 1) % size))
        waits.append((own, form, ranks))
    return waits


def parameters() -> list[tuple[int, int, str, str]]:
    return list(itertools.product(range(2, 9), range(2, 6), KINDS, FORMS))


def _deadlock(size: int, groups: int, kind: str, form: str) -> float:
    """Makes a cycle of the first `size` ranks. Returns the seconds until this rank has the error."""
    rank = dist.get_rank()
    waits = cycle(size, groups, kind, form)
    shared = [dist.new_group(list(range(size)), timeout=DEADLINE) for _ in range(groups)]
    made = [
        shared[index % groups] if len(ranks) == size and size > 2 else dist.new_group(ranks, timeout=DEADLINE)
        for index, (_, _, ranks) in enumerate(waits)
    ]
    pids: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    dist.barrier()
    seconds = 0.0
    if rank < size:
        begun = time.monotonic()
        own, form, _ = waits[rank]
        with pytest.raises(smddp.DeadlockError) as raised:
            wait_for(own, form, (rank + 1) % size, made[rank])
        seconds, text = time.monotonic() - begun, str(raised.value)
        assert f"deadlock of {size} ranks: rank " in text, text
        assert len(re.findall(rf"{_HERE}:\d+ in ", text)) == size, text
        for pid in pids[:size]:
            assert f", pid {pid}) waits in " in text, (pid, text)
        assert "make the calls of these groups in the same order on every rank" in text, text
        assert seconds < LIMIT, (seconds, text)
    dist.barrier()
    for group in [*shared, *(group for group in made if group not in shared)]:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            with contextlib.suppress(smddp.Error):
                dist.destroy_process_group(group)
    return seconds


@keeps_group
def cycles(chosen: list[tuple[int, int, str, str]]) -> str:
    """Makes these cycles. Returns the parameters and seconds of each."""
    found = []
    for size, groups, kind, form in chosen:
        seconds = torch.tensor([_deadlock(size, groups, kind, form)])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(f"{size} {groups} {kind} {form} {float(seconds):.2f}")
    return "\n".join(found)


@keeps_group
def slow_ranks(duration: float, seed: int) -> str:
    """Matching calls in overlapping groups, with delays that exceed the time of the first probe. Returns the calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dice, own = random.Random(seed), random.Random(f"{seed} {rank}")
    lists = [list(range(size))] + [sorted(dice.sample(range(size), dice.randrange(2, size))) for _ in range(4)]
    groups = [dist.new_group(ranks, timeout=DEADLINE) for ranks in lists]
    until, calls, pending = time.monotonic() + duration, 0, []
    ends = torch.zeros(1)
    while not float(ends):
        for _ in range(200):
            index, kind, form = dice.randrange(len(lists)), dice.randrange(4), dice.randrange(2)
            ranks, group = lists[index], groups[index]
            root, peer = dice.choice(ranks), dice.choice(ranks)
            sleeps = own.random() < 0.002
            if rank not in ranks:
                continue
            if sleeps:
                time.sleep(own.uniform(0.4, 1.5))
            calls += 1
            tensor = torch.ones(8)
            if kind == 0:
                work = dist.all_reduce(tensor, group=group, async_op=bool(form))
            elif kind == 1:
                work = dist.broadcast(tensor, src=root, group=group, async_op=bool(form))
            elif kind == 2 and root != peer and rank in (root, peer):
                work = dist.isend(tensor, peer, group) if rank == root else dist.irecv(tensor, root, group)
            else:
                work = None
            if work is not None:
                pending.append(work)
            if len(pending) > 3:
                pending.pop(own.randrange(len(pending))).wait()
        while pending:
            pending.pop().wait()
        ends[0] = float(time.monotonic() >= until)
        dist.broadcast(ends, src=0)
    return str(calls)


@keeps_group
def another_thread_makes_the_call() -> None:
    """Two threads of rank 0 wait in different groups: the call that rank 1 waits for follows in the other thread."""
    a, b = dist.new_group([0, 1], timeout=DEADLINE), dist.new_group([0, 1], timeout=DEADLINE)
    if dist.get_rank() == 0:
        made = threading.Event()

        def later() -> None:
            dist.barrier(b)  # This thread has made a call of the library before.
            made.set()
            time.sleep(2.5)
            dist.all_reduce(torch.ones(2), group=b)

        thread = threading.Thread(target=later)
        thread.start()
        made.wait()
        dist.all_reduce(torch.ones(2), group=a)
        thread.join()
    elif dist.get_rank() == 1:
        dist.barrier(b)
        dist.all_reduce(torch.ones(2), group=b)
        dist.all_reduce(torch.ones(2), group=a)
    dist.barrier()


@keeps_group
def short_deadline_is_kept() -> None:
    """A call with a short time limit ends at its deadline, and its caller continues."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        with pytest.raises(smddp.CollectiveTimeoutError):
            dist.barrier(group)
    dist.barrier()


@keeps_group
def message_deadlines_are_kept() -> None:
    """Two recvs that wait for each other end at their deadline, and their group continues."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=6))
    if dist.get_rank() < 2:
        with pytest.raises(smddp.CollectiveTimeoutError):
            dist.recv(torch.ones(2), 1 - dist.get_rank(), group)
        dist.barrier(group)
    dist.barrier()


@keeps_group
def reported_cycle_continues_to_its_deadline() -> None:
    """By default the calls of a cycle end at their deadline."""
    limit = datetime.timedelta(seconds=6)
    groups = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    with pytest.raises(smddp.CollectiveTimeoutError):
        dist.all_reduce(torch.ones(2), group=groups[dist.get_rank()])
    dist.barrier()


def _exchange() -> None:
    """Rank 0 waits for rank 1, which waits for a message that other code of rank 0 sends."""
    tensor = torch.zeros(2)
    if dist.get_rank() == 0:
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
    assert tensor.tolist() == [1.0, 1.0]


@keeps_group
def new_thread_sends() -> None:
    """A thread without earlier calls sends the message."""
    sender = threading.Timer(2.5, lambda: dist.send(torch.ones(2), 1))
    if dist.get_rank() == 0:
        sender.start()
    _exchange()
    if dist.get_rank() == 0:
        sender.join()
    dist.barrier()


@keeps_group
def callback_sends() -> None:
    """The callback of a future sends the message."""
    group, first = dist.new_group([0, 1], timeout=DEADLINE), torch.ones(1)
    if dist.get_rank() == 0:
        future = dist.irecv(first, 1, group).get_future()
        future.then(lambda _: dist.isend(torch.ones(2), 1))
    else:
        sender = threading.Timer(2.5, lambda: dist.send(first, 0, group))
        sender.start()
    _exchange()
    dist.barrier()


@keeps_group
def signal_handler_sends() -> None:
    """The handler of an interval timer sends the message in another group."""
    if dist.get_rank() == 0:
        signal.signal(signal.SIGALRM, lambda *_: dist.isend(torch.ones(2), 1, group=group))
    group = dist.new_group([0, 1], timeout=DEADLINE)
    tensor = torch.zeros(2)
    if dist.get_rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 2.5)
        dist.recv(tensor, 1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    else:
        dist.recv(tensor, 0, group)
        dist.send(tensor, 0)
    assert tensor.tolist() == [1.0, 1.0]
    dist.barrier()
