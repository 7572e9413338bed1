"""Product of the context-parallel parity suite, in the form of `combinations.py`."""

from __future__ import annotations

import combinations

DIMENSIONS: dict[str, list] = {
    "family": ["llama", "window", "mixtral", "gpt2", "gpt_neox"],
    "context": [1, 2, 4],
    "comm": ["p2p", "all_gather"],
    "tensor": [1, 2],
    "shard": [0, 2, 4],
    "fsdp": [1, 2],
    "mask": ["causal", "padded", "packed"],
    "checkpointing": ["none", "reentrant", "non_reentrant"],
    "offload": [False, True],
    "backend": ["smddp", "gloo"],
}
# Parameters that affect only context parallelism.
_OF_PARTS = ("family", "comm", "checkpointing", "offload")


def possible(row: dict) -> bool:
    """Degrees must fit the world and the sharding group, and only checkpointed layers are offloaded.

    With degree 1 nothing is split, and the options are those of `combinations.py`.
    """
    ranks = combinations.RANKS // row["tensor"]
    plain = all(row[key] == values[0] for key, values in DIMENSIONS.items() if key in _OF_PARTS)
    return (
        (row["context"] > 1 or plain)
        and row["shard"] <= ranks
        and row["context"] <= (row["shard"] or ranks)
        and not (row["offload"] and row["checkpointing"] == "none")
    )


def product() -> list[dict]:
    """Every possible combination."""
    return combinations.product(DIMENSIONS, possible)


def pairwise() -> list[dict]:
    """Returns a pairwise selection of the possible combinations."""
    return combinations.choose(product())


def name(row: dict) -> str:
    """A test's id."""
    options = "" if row["checkpointing"] == "none" else f"-{row['checkpointing']}" + "-offload" * row["offload"]
    degrees = f"context{row['context']}-tensor{row['tensor']}-shard{row['shard']}"
    return f"{row['backend']}-{row['family']}-{row['mask']}-{row['comm']}-{degrees}-fsdp{row['fsdp']}{options}"
