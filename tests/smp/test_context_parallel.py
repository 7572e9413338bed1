"""Parity of context parallelism with one process: losses, and every gathered gradient.

`make test` runs combinations that hold every pair of values, the backend's among them; `make test-smp-full` all.
"""

from __future__ import annotations

import os

import pytest
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
import combinations
import context_combinations

PAIRWISE = context_combinations.pairwise()


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def pool(request):
    with client_pool(combinations.RANKS, HERE, request.param) as pool:
        yield pool


def test_pairwise(pool):
    """In one group, since each combination takes less time than making one."""
    rows = [row for row in PAIRWISE if row["backend"] == pool.backend]
    pool.run("smp_cases.context_parallel", "train_all", seconds=180.0, rows=rows)


def test_the_chosen_combinations_hold_every_possible_pair():
    held = {pair for row in PAIRWISE for pair in combinations._pairs(row)}
    assert held == {pair for row in context_combinations.product() for pair in combinations._pairs(row)}
    assert len(PAIRWISE) < 24


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", context_combinations.DIMENSIONS["family"])
def test_full(pool, family):
    """All combinations of one family."""
    wanted = {"family": family, "backend": pool.backend}.items()
    rows = [row for row in context_combinations.product() if wanted <= row.items()]
    combinations.train_all(pool, "context_parallel", rows, 1400.0)
