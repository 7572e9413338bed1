"""Product of the parity suite of experts with context parallelism, in the form of `combinations.py`."""

from __future__ import annotations

import combinations

DIMENSIONS: dict[str, list] = {
    "family": ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"],
    "context": [2, 4],
    "comm": ["p2p", "all_gather"],
    "expert": [1, 2, 4],
    "tensor": [1, 2],
    "shard": [0, 2],
    "fsdp": [1, 2],
    "balancing": ["none", "sinkhorn", "aux_loss"],
    "dispatcher": ["all_to_all", "shuffled"],
    "checkpointing": [False, True],
}


def possible(row: dict) -> bool:
    """As for experts alone, and contexts are parts of a sharding group."""
    ranks = combinations.RANKS // row["tensor"]
    if row["shard"] > ranks or row["context"] > (row["shard"] or ranks) or row["expert"] > ranks:
        return False
    if row["family"] == "gpt_oss" and row["tensor"] > 1:
        return False
    if row["family"] in ("gpt_oss", "deepseek_v3") and row["balancing"] == "aux_loss":
        return False
    return row["expert"] > 1 or row["dispatcher"] == "all_to_all"


def product() -> list[dict]:
    """Every possible combination."""
    return combinations.product(DIMENSIONS, possible)


def pairwise() -> list[dict]:
    """Returns a pairwise selection of the possible combinations."""
    return combinations.choose(product())
