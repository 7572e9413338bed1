"""Product of the expert parity suite, and its pairwise selection."""

from __future__ import annotations

import combinations

RANKS = 4
DIMENSIONS: dict[str, list] = {
    "family": ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3"],
    "expert": [1, 2, 4],
    "tensor": [1, 2],
    "shard": [0, 1, 2, 4],
    "fsdp": [1, 2],
    "balancing": ["none", "sinkhorn", "aux_loss", "balanced"],
    "dispatcher": ["all_to_all", "all_gather", "shuffled"],
    "checkpointing": [False, True],
    "backend": ["smddp", "gloo"],
}
_RECOMPUTED = {"tensor": 1, "shard": 0, "fsdp": 1, "checkpointing": True, "balancing": "none", "backend": "smddp"}
# A tensor group does not share experts with biases yet.
_WITHOUT_TENSOR_PARALLELISM = ("gpt_oss",)
# Families whose routers do not use a softmax over all experts.
_OTHER_ROUTERS = ("gpt_oss", "deepseek_v3")


def possible(row: dict) -> bool:
    """Degrees must fit the world and the family; losses of our own to compare with are of a softmax's routers."""
    if row["tensor"] * row["expert"] > RANKS or row["tensor"] * row["shard"] > RANKS:
        return False
    if row["tensor"] > 1 and row["family"] in _WITHOUT_TENSOR_PARALLELISM:
        return False
    if row["balancing"] == "aux_loss" and row["family"] in _OTHER_ROUTERS:
        return False
    return row["expert"] > 1 or row["dispatcher"] == "all_to_all"


def product() -> list[dict]:
    """Every possible combination."""
    return combinations.product(DIMENSIONS, possible)


def pairwise() -> list[dict]:
    """Few combinations that hold every possible pair of values, and three values together that FSDP1 treats apart."""
    rows = combinations.choose(product())
    return [*rows, {**rows[0], "family": "mixtral", "expert": 1, "dispatcher": "all_to_all", **_RECOMPUTED}]


def over(backend: str, rows: list[dict]) -> list[dict]:
    """Returns the ``rows`` that run over ``backend``, without the backend."""
    return [{key: value for key, value in row.items() if key != "backend"} for row in rows if row["backend"] == backend]
