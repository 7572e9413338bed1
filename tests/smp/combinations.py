"""Product of the parity suite (engines, degrees, options and models), and its pairwise selection."""

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
    """Returns True if the degrees fit the world and offloading has checkpointed layers."""
    return row["tensor"] * max(row["shard"], 1) <= RANKS and not (row["offload"] and row["checkpointing"] == "none")


def product(dimensions: dict[str, list] = DIMENSIONS, possible: Callable[[dict], bool] = possible) -> list[dict]:
    """Every possible combination."""
    rows = (dict(zip(dimensions, values)) for values in itertools.product(*dimensions.values()))
    return [row for row in rows if possible(row)]


def train_all(pool, module: str, rows: list[dict], seconds: float) -> None:
    """`rows` by a module's `train_all`, a few in a default group; gloo's threads outlive that, so its ranks end."""
    few, fresh = 16, 32
    for first in range(0, len(rows), few):
        if pool.backend == "gloo" and first % fresh == 0:
            pool.close()
        pool.run(f"smp_cases.{module}", "train_all", seconds=seconds, rows=rows[first : first + few])


def pairwise() -> list[dict]:
    """Returns a pairwise selection of the possible combinations."""
    return choose(product())


def pairwise_of_any_family() -> list[dict]:
    """Returns a pairwise selection without the family, with families assigned round-robin."""
    rows = choose([{key: row[key] for key in row if key != "family"} for row in product() if row["family"] == "llama"])
    return [{"family": family, **row} for family, row in zip(itertools.cycle(DIMENSIONS["family"]), rows)]


def choose(rows: list[dict]) -> list[dict]:
    """Selects a subset of ``rows`` that contains every pair of values in ``rows``.

    Greedy: always the row with the most pairs that are not held yet.
    """
    pairs = [_pairs(row) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(missing & pairs[index]))
        missing -= pairs[best]
        chosen.append(rows[best])
    return chosen


def _pairs(row: dict) -> set:
    return set(itertools.combinations(row.items(), 2))


def name(row: dict) -> str:
    """A test's id."""
    checkpointing = {"none": "", "reentrant": "-reentrant", "non_reentrant": "-checkpointed"}[row["checkpointing"]]
    options = checkpointing + "-offload" * row["offload"] + "-delayed" * row["delayed"]
    return f"{row['family']}-fsdp{row['fsdp']}-shard{row['shard']}-tensor{row['tensor']}{options}"
