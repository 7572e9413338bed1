"""The product of training settings: engines, degrees, precision, optimizers, memory, checkpoints and adapters."""

from __future__ import annotations

import random

import combinations

DIMENSIONS: dict[str, list] = {
    "engine": ["none", "fsdp1", "fsdp2"],
    "shard": [1, 2, 4],
    "tensor": [1, 2, 4],
    "context": [1, 2],
    "expert": [0, 1, 2],  # 0: a model without experts
    "precision": ["f32", "bf16", "fp16"],
    "optimizer": ["adam", "sgd", "adafactor", "lbfgs", "muon"],
    "accumulation": [1, 2],
    "memory": ["none", "checkpointing", "offload"],
    "resume": ["none", "same", "other"],
    "adapter": [False, True],
}


def possible(row: dict) -> bool:
    """Degrees must fit the world, and torch must be able to do the same in one process."""
    ranks = combinations.RANKS // row["tensor"]
    # Without FSDP nothing averages gradients over data-parallel ranks.
    if row["engine"] == "none" and (row["tensor"] < combinations.RANKS or row["shard"] > 1):
        return False
    # torch's GradScaler takes no closure, and its sharded state dicts have no form of this optimizer's state.
    if row["optimizer"] == "lbfgs" and (row["precision"] == "fp16" or row["resume"] != "none"):
        return False
    # Adafactor refuses the other degree of FSDP1.
    if row["optimizer"] == "adafactor" and row["engine"] == "fsdp1" and row["resume"] == "other":
        return False
    # Muon takes matrices, which the shards of FSDP1 are not.
    if row["optimizer"] == "muon" and row["engine"] == "fsdp1":
        return False
    return row["shard"] <= ranks and row["context"] <= row["shard"] and row["expert"] <= ranks


def refusal(row: dict) -> tuple[type[Exception], str] | None:
    """The error that is the right result of a combination, or None if it trains."""
    experts = row["expert"] > 1 and not row["adapter"]  # experts are frozen beside an adapter
    if row["optimizer"] in ("adafactor", "lbfgs") and row["engine"] == "fsdp1":
        if row["shard"] > 1 or (experts and row["tensor"] == 1):
            return ValueError, "adds up over all elements"
    if row["optimizer"] == "lbfgs" and experts:
        return ValueError, "experts are on another mesh"
    if row["optimizer"] == "adafactor" and (row["tensor"] > 1 or row["engine"] == "fsdp2"):
        return RuntimeError, "no valid strategy preserves this placement"  # torch's, for any DTensor
    return None


def product() -> list[dict]:
    """Every possible combination."""
    return combinations.product(DIMENSIONS, possible)


def pairwise() -> list[dict]:
    """Few combinations that hold every pair of values that trains, then the same for refused combinations."""
    train, refused = [], []
    for row in product():
        (refused if refusal(row) else train).append(row)
    return [*combinations.choose(train), *combinations.choose(refused)]


def drawn(count: int) -> list[dict]:
    """``count`` possible combinations that train, always the same; the product is too large to list in a short test."""
    draw, found = random.Random(1), []
    while len(found) < count:
        row = {key: draw.choice(values) for key, values in DIMENSIONS.items()}
        if possible(row) and refusal(row) is None:
            found.append(row)
    return found
