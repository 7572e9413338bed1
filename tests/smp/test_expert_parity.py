"""Every combination of experts' degrees, balancing and dispatchers trains as one process does: losses, and every
gathered gradient.

`make test` runs combinations that hold every pair of values; `make test-smp-full` all of them.
"""

from __future__ import annotations

import os

import context_expert_combinations
import expert_combinations as combinations
import pytest
from combinations import train_all
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
PAIRWISE = combinations.pairwise()


@pytest.fixture(scope="module")
def over_gloo():
    with client_pool(combinations.RANKS, HERE, "gloo") as pool:
        yield pool


def test_pairwise_over_smddp(ranks):
    rows = combinations.over("smddp", PAIRWISE)
    ranks.run("smp_cases.expert_parity", "train_all", seconds=280.0, rows=rows)


def test_pairwise_over_gloo(over_gloo):
    rows = combinations.over("gloo", PAIRWISE)
    over_gloo.run("smp_cases.expert_parity", "train_all", seconds=280.0, rows=rows)


def test_split_sequences_over_smddp(ranks):
    """Contexts and experts at once."""
    rows = context_expert_combinations.pairwise()
    ranks.run("smp_cases.expert_parity", "train_all", seconds=280.0, rows=rows)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("expert", context_expert_combinations.DIMENSIONS["expert"])
@pytest.mark.parametrize("family", context_expert_combinations.DIMENSIONS["family"])
def test_split_sequences_full_over_smddp(ranks, family, expert):
    rows = [r for r in context_expert_combinations.product() if (r["family"], r["expert"]) == (family, expert)]
    train_all(ranks, "expert_parity", rows, 2800.0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("expert", combinations.DIMENSIONS["expert"])
@pytest.mark.parametrize("family", combinations.DIMENSIONS["family"])
@pytest.mark.parametrize(("backend", "pool"), [("smddp", "ranks"), ("gloo", "over_gloo")])
def test_full(request, backend, pool, family, expert):
    rows = [row for row in combinations.product() if (row["family"], row["expert"]) == (family, expert)]
    train_all(request.getfixturevalue(pool), "expert_parity", combinations.over(backend, rows), 2800.0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_loss_scaling_full(ranks):
    ranks.run("smp_cases.grad_scaler", "every_combination", seconds=1400.0)
