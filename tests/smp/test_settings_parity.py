"""Every pair of training settings trains as one process does, or is refused for a known reason.

`make test` runs a few of the combinations that hold every pair; `make test-smp-full` runs all of them.
"""

from __future__ import annotations

import pytest
import settings_combinations as combinations

SAMPLES = 4


def _sampled() -> list[dict]:
    """Combinations that take turns, and one at a shard degree of 1 whose checkpoint has spread experts."""
    rows = combinations.pairwise()
    spread = {"engine": "fsdp2", "shard": 1, "tensor": 1, "expert": 2, "resume": "same", "optimizer": "sgd"}
    return [*rows[:: len(rows) // SAMPLES + 1], {**rows[0], **spread}]


def test_the_chosen_combinations_hold_every_possible_pair():
    held = {pair for row in combinations.pairwise() for pair in combinations.pairs(row)}
    assert held == {pair for row in combinations.product() for pair in combinations.pairs(row)}


def test_some_combinations(ranks):
    ranks.run("smp_cases.settings_parity", "train_all", seconds=280.0, rows=_sampled())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_pair(ranks):
    ranks.run("smp_cases.settings_parity", "train_all", seconds=1400.0, rows=combinations.pairwise())
