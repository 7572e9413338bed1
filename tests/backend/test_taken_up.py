"""Asynchronous calls go on while their caller does other things, whatever else this process waits for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from backend.ranks import BACKEND, Pool

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="how a rank waits is smddp's")

ROUNDS = 11


@pytest.fixture(scope="module")
def nodes() -> Iterator[Pool]:
    """Two ranks, a node each."""
    made = Pool(2, lambda rank: {"SMDDP_NODE": f"node{rank}"})
    yield made
    made.close()


def one_group_waits_and_another_calls() -> None:
    """Seconds that rank 1 waits for a call that rank 0 made before it computes.

    Rank 0's host has to take part meanwhile. In every second round it also has a call of another group under way, to
    which nobody comes: the thread that looks after both sleeps for that one, 20 ms where nothing wakes it.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    waits, calls = dist.new_group([0, 1]), dist.new_group([0, 1])
    took: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * ROUNDS):
        beside = turn % 2 == 1
        few, many = torch.ones(4), torch.ones(1 << 18)
        if rank == 0:
            early = dist.all_reduce(few, group=waits, async_op=True) if beside else None
            # So long that there is nothing to do for that group but to sleep.
            time.sleep(0.003)
            work = dist.all_reduce(many, group=calls, async_op=True)
            store.set(f"called {turn}", "yes")
            # The caller computes.
            store.wait([f"ended {turn}"])
            work.wait()
        else:
            store.wait([f"called {turn}"])
            begun = time.perf_counter()
            dist.all_reduce(many, group=calls)
            took[beside].append(time.perf_counter() - begun)
            store.set(f"ended {turn}", "yes")
            early = dist.all_reduce(few, group=waits, async_op=True) if beside else None
        if early is not None:
            early.wait()
            assert torch.equal(few, torch.full((4,), 2.0))
        assert torch.equal(many, torch.full((1 << 18,), 2.0))
    if rank == 1:
        assert statistics.median(took[True]) < 4 * statistics.median(took[False]), took


one_group_waits_and_another_calls.case = one_group_waits_and_another_calls


def test_a_call_is_taken_up_at_once_though_another_group_is_slept_for(nodes):
    nodes.run(__name__, "one_group_waits_and_another_calls", 60)
