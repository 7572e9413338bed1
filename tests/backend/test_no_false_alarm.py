"""Matching calls raise nothing, in any combination of torch's forms."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend import calls
from backend.calls import LARGE, SMALL, Call

DEADLINE = datetime.timedelta(seconds=60)
SECONDS = 280.0


def right(size: int, dice: random.Random, own: random.Random) -> Call:
    """Returns a call that all ranks make. dice: equal on all ranks; own: differs between ranks."""
    count = dice.choice((0, 1, SMALL, 300, LARGE))
    dtype = dice.choice((torch.float32, torch.bfloat16, torch.int32))
    root = dice.randrange(size)
    sizes = [count] * size if dice.random() < 0.5 else [dice.randrange(5) for _ in range(size)]
    even = len(set(sizes)) == 1
    form = own.choice(("list", "tensor")) if even else "list"
    splits = own.choice(("list", "splits", "even")) if even else own.choice(("list", "splits"))
    kinds = (
        lambda: calls.all_reduce(count, dtype, form=own.choice(("flat", "shaped"))),
        lambda: calls.all_reduce(count, torch.float32, "PREMUL_SUM:0.5"),
        lambda: calls.reduce(count, root, dtype, "MAX"),
        lambda: calls.broadcast(count, root, dtype, own.choice(("flat", "strided"))),
        lambda: calls.gather(count, root, dtype),
        lambda: calls.scatter(count, root, dtype),
        lambda: calls.all_gather(sizes, dtype, form),
        lambda: calls.reduce_scatter(sizes, dtype, form=form),
        lambda: calls.all_to_all(sizes, dtype, splits),
        lambda: calls.coalesced([count, 3], dtype),
        calls.barrier,
    )
    return dice.choice(kinds)()


def ring(group: Any) -> None:
    """Sends from each rank to the next."""
    rank, size = group.rank(), group.size()
    sent = dist.isend(torch.ones(3), calls.world_rank(group, (rank + 1) % size), group)
    dist.recv(torch.ones(3), calls.world_rank(group, (rank - 1) % size), group)
    sent.wait()


def no_alarm(groups: int, count: int) -> None:
    """Makes `count` matching calls in each group, with up to eight groups at a time, then destroys the groups."""
    for seed in range(groups):
        group = dist.new_group(timeout=DEADLINE)
        dice, own = random.Random(seed), random.Random(f"{seed} of {group.rank()}")
        works: list[Any] = []
        for number in range(count):
            later = own.random() < 0.5
            work = right(group.size(), dice, own).make(group, later)
            works += [work] if later and work is not None else []
            if len(works) == 8 or number == count - 1:
                for each in works:
                    each.wait()
                works.clear()
            if number % 10 == 9:
                ring(group)
        dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2, 3, seconds=SECONDS)
def test_matching_calls_in_any_form_raise_nothing():
    no_alarm(groups=10, count=100)


@pytest.mark.slow
@pytest.mark.timeout(3700)
@on_ranks(2, 3, seconds=3600.0)
def test_a_hundred_thousand_matching_calls_raise_nothing():
    no_alarm(groups=100, count=1000)
