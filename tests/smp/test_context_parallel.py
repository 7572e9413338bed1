"""Context parallelism trains as one process does: losses, and every gathered gradient.

`make test` runs combinations that hold every pair of values, on smddp and on gloo; `make test-smp-full` all of them.
"""

from __future__ import annotations

import os

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
import combinations
import context_combinations

PAIRWISE = context_combinations.pairwise()


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def pool(request):
    from ranks import Ranks

    pool = Ranks(combinations.RANKS, request.param, path=HERE)
    yield pool
    pool.close()


def test_pairwise(pool):
    """In one group, since each combination takes less time than making one."""
    pool.run("smp_cases.context_parallel", "train_all", seconds=180.0, rows=PAIRWISE)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", context_combinations.DIMENSIONS["family"])
def test_full(pool, family):
    """All combinations of one family."""
    rows = [row for row in context_combinations.product() if row["family"] == family]
    pool.run("smp_cases.context_parallel", "train_all", seconds=1400.0, rows=rows)
