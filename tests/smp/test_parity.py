"""Every combination of features trains as the plain model does: losses, and every gathered gradient.

`make test` runs combinations that hold every pair of values, on smddp and on gloo; `make test-smp-full` all of them.
"""

from __future__ import annotations

import os

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
import combinations

PAIRWISE = combinations.pairwise()


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def pool(request):
    from ranks import Ranks

    pool = Ranks(combinations.RANKS, request.param, path=HERE)
    yield pool
    pool.close()


def test_the_chosen_combinations_hold_every_possible_pair():
    held = {pair for row in PAIRWISE for pair in combinations._pairs(row)}
    assert held == {pair for row in combinations.product() for pair in combinations._pairs(row)}
    assert len(PAIRWISE) < 60


@pytest.mark.parametrize("row", PAIRWISE, ids=combinations.name)
def test_pairwise(pool, row):
    pool.run("smp_cases.parity", "train_as_the_plain_model", seconds=180.0, **row)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", combinations.DIMENSIONS["family"])
def test_full(pool, family):
    """All combinations of one family, a few in a group."""
    rows = [row for row in combinations.product() if row["family"] == family]
    combinations.train_all(pool, "parity", rows, 1400.0)
