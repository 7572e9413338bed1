"""Every combination of features trains as the plain model does: losses, and every gathered gradient.

`make test` runs combinations that hold every pair of values on smddp, and on gloo, which knows nothing of models, every
pair but those with a family; `make test-smp-full` all of them on both.
"""

from __future__ import annotations

import os

import pytest
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
import combinations

PAIRWISE = {"smddp": combinations.pairwise(), "gloo": combinations.pairwise_of_any_family()}
ROWS = [pytest.param(on, row, id=f"{on}-{combinations.name(row)}") for on, rows in PAIRWISE.items() for row in rows]


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def pool(request):
    with client_pool(combinations.RANKS, HERE, request.param) as pool:
        yield pool


def test_the_chosen_combinations_hold_every_possible_pair():
    held = {name: {pair for row in rows for pair in combinations._pairs(row)} for name, rows in PAIRWISE.items()}
    possible = {pair for row in combinations.product() for pair in combinations._pairs(row)}
    assert held["smddp"] == possible
    assert held["gloo"] >= {pair for pair in possible if "family" not in dict(pair)}
    assert len(PAIRWISE["smddp"]) < 60 and len(PAIRWISE["gloo"]) < 25


@pytest.mark.parametrize(("pool", "row"), ROWS, indirect=["pool"])
def test_pairwise(pool, row):
    pool.run("smp_cases.parity", "train_as_the_plain_model", seconds=180.0, **row)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", combinations.DIMENSIONS["family"])
def test_full(pool, family):
    """All combinations of one family, a few in a group."""
    rows = [row for row in combinations.product() if row["family"] == family]
    combinations.train_all(pool, "parity", rows, 1400.0)
