"""The product that the parity suite covers: engines, degrees, options and models, and a pairwise choice from it."""

from __future__ import annotations

import itertools

RANKS = 4
DIMENSIONS: dict[str, list] = {
    "family": ["llama", "mistral", "mixtral", "qwen", "gpt_neox", "gemma", "phi", "gpt2", "falcon"],
    "fsdp": [1, 2],
    "tensor": [1, 2, 4],
    "shard": [0, 1, 2, 4],
    "checkpointing": ["none", "reentrant", "non_reentrant"],
    "offload": [False, True],
    "delayed": [False, True],
}


def possible(row: dict) -> bool:
    """Degrees must fit the world, and only checkpointed layers are offloaded."""
    return row["tensor"] * max(row["shard"], 1) <= RANKS and not (row["offload"] and row["checkpointing"] == "none")


def product() -> list[dict]:
    """Every possible combination."""
    rows = (dict(zip(DIMENSIONS, values)) for values in itertools.product(*DIMENSIONS.values()))
    return [row for row in rows if possible(row)]


def pairwise(rows: list[dict] | None = None) -> list[dict]:
    """Few combinations that hold every pair of values which some of ``rows`` (by default `product()`) holds.

    Greedy: always the row with the most pairs that are not held yet.
    """
    rows = product() if rows is None else rows
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: dict) -> set:
    return set(itertools.combinations(row.items(), 2))


def name(row: dict) -> str:
    """A test's id."""
    checkpointing = {"none": "", "reentrant": "-reentrant", "non_reentrant": "-checkpointed"}[row["checkpointing"]]
    options = checkpointing + "-offload" * row["offload"] + "-delayed" * row["delayed"]
    return f"{row['family']}-fsdp{row['fsdp']}-shard{row['shard']}-tensor{row['tensor']}{options}"
