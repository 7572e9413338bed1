"""Parity of combined training settings with one process, or rejection with a known reason.

`make test` runs a few combinations; `make test-smp-full` runs combinations that hold every possible pair of values.
"""

from __future__ import annotations

import importlib.util

import pytest
import settings_combinations as combinations

# Experts are spread over ranks whose other parameters are copies, which a checkpoint must still hold whole.
SPREAD = {
    "engine": "fsdp2",
    "shard": 1,
    "tensor": 1,
    "context": 1,
    "expert": 2,
    "precision": "f32",
    "optimizer": "sgd",
    "accumulation": 1,
    "memory": "none",
    "resume": "same",
    "adapter": False,
    "client": "loop",
}
# A client's checkpoint of experts at another tensor degree is refused before it is read.
OTHER_FORM = {**SPREAD, "shard": 2, "tensor": 2, "expert": 1, "resume": "other", "client": "trainer"}
CLIENTS = combinations.DIMENSIONS["client"]


def test_some_combinations(ranks):
    rows = [
        SPREAD,
        OTHER_FORM,
        *combinations.drawn(4),
        *combinations.drawn(1, "accelerate"),
        *combinations.drawn(1, "trainer"),
    ]
    ranks.run("smp_cases.settings_parity", "train_all", seconds=280.0, rows=rows)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("client", CLIENTS)
def test_every_pair(ranks, client):
    if client == "lightning" and importlib.util.find_spec(client) is None:
        pytest.skip("Lightning is not installed: make test-clients")
    rows = combinations.pairwise(client)
    ranks.run("smp_cases.settings_parity", "train_all", seconds=1400.0, rows=rows)
