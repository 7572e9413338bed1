"""The product that the parity suite covers: engines, degrees, options and models, and a pairwise choice from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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


def product(dimensions: dict[str, list] = DIMENSIONS, possible: Callable[[dict], bool] = possible) -> list[dict]:
    """Every possible combination."""
    rows = (dict(zip(dimensions, values)) for values in itertools.product(*dimensions.values()))
    return [row for row in rows if possible(row)]


def in_parts(rows: list[dict], most: int = 16) -> list[list[dict]]:
    """`rows` in runs of a few: groups end with the default group after each, and gloo has threads for every one."""
    return [rows[first : first + most] for first in range(0, len(rows), most)]


def pairwise() -> list[dict]:
    """Few combinations that hold every pair of values which some possible combination holds."""
    return choose(product())


def choose(rows: list[dict]) -> list[dict]:
    """Few of ``rows`` that hold every pair of values which some row holds.

    Greedy: always the row with the most pairs that are not held yet.
    """
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
