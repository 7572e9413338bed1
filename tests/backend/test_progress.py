"""Asynchronous calls progress while their caller computes and other groups wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks.cases import keeps_group
from ranks.group import BACKEND
from ranks.pool import Pool

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="tests smddp's wait loop")

ROUNDS = 11


@pytest.fixture(scope="module")
def nodes() -> Iterator[Pool]:
    """Two ranks on two nodes."""
    with Pool(2, lambda rank: {"SMDDP_NODE": f"node{rank}"}) as made:
        yield made


@keeps_group
def one_group_waits_and_another_calls() -> None:
    """Measures the seconds that rank 1 waits for a call that rank 0 started before it computes.

    Rank 0's helper thread has to drive the call. In every second round rank 0 also has a call of another group pending
    that rank 1 has not made: for that call the thread sleeps up to 20 ms unless it is woken.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    waits, calls = dist.new_group([0, 1]), dist.new_group([0, 1])
    took: dict[bool, list[float]] = {False: [], True: []}
    for step in range(2 * ROUNDS):
        beside = step % 2 == 1
        few, many = torch.ones(4), torch.ones(1 << 18)
        if rank == 0:
            early = dist.all_reduce(few, group=waits, async_op=True) if beside else None
            # Long enough for the helper thread to sleep.
            time.sleep(0.003)
            work = dist.all_reduce(many, group=calls, async_op=True)
            store.set(f"called {step}", "yes")
            # The caller computes.
            store.wait([f"ended {step}"])
            work.wait()
        else:
            store.wait([f"called {step}"])
            begun = time.perf_counter()
            dist.all_reduce(many, group=calls)
            took[beside].append(time.perf_counter() - begun)
            store.set(f"ended {step}", "yes")
            early = dist.all_reduce(few, group=waits, async_op=True) if beside else None
        if early is not None:
            early.wait()
            assert torch.equal(few, torch.full((4,), 2.0))
        assert torch.equal(many, torch.full((1 << 18,), 2.0))
    if rank == 1:
        assert statistics.median(took[True]) < 4 * statistics.median(took[False]), took


def test_a_call_progresses_although_the_thread_sleeps_for_another_group(nodes):
    nodes.run(__name__, "one_group_waits_and_another_calls", 60)
