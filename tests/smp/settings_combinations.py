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
    "client": ["loop", "accelerate", "trainer", "lightning"],
}
#: Optimizers that a client cannot step: Trainer and Lightning hold one, and Trainer passes no closure.
NOT_STEPPED = {"trainer": ("lbfgs", "muon"), "lightning": ("muon",), "accelerate": (), "loop": ()}


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
    if row["client"] != "loop" and not _client_can(row):
        return False
    return row["shard"] <= ranks and row["context"] <= row["shard"] and row["expert"] <= ranks


def _client_can(row: dict) -> bool:
    """Returns True if the client supports the row on CPU."""
    client = row["client"]
    # Closures run once for each part of an accumulated batch.
    if row["optimizer"] in NOT_STEPPED[client] or (row["optimizer"] == "lbfgs" and row["accumulation"] > 1):
        return False
    if client == "lightning":
        return True
    # Accelerate saves an optimizer for each model.
    if client == "accelerate" and row["optimizer"] == "muon" and row["resume"] != "none":
        return False
    # Both wrap the model themselves, inside of the offloading wrapper, and take float16 on GPUs only.
    if row["precision"] == "fp16" or row["memory"] == "offload":
        return False
    # They compute with parameters in bf16, whose rounding Adafactor's relative steps magnify.
    if row["precision"] == "bf16" and row["optimizer"] == "adafactor":
        return False
    return client == "accelerate" or row["context"] == 1  # Trainer gives each rank other samples


Refusal = tuple[type[BaseException], str] | None


def refusal(row: dict) -> Refusal:
    """Returns the expected error of a combination, or None if it trains."""
    of_optimizer = _of_optimizer(row)
    if row["client"] not in ("accelerate", "trainer"):
        return of_optimizer
    of_states = _of_states(row)
    # Trainer refuses before it trains; Accelerator when it saves.
    first = of_states if row["client"] == "trainer" else None
    return _of_degrees(row) or first or of_optimizer or of_states or _of_other_degree(row)


def _of_optimizer(row: dict) -> Refusal:
    experts = row["expert"] > 1 and not row["adapter"]  # experts are frozen beside an adapter
    if row["optimizer"] in ("adafactor", "lbfgs") and row["engine"] == "fsdp1":
        if row["shard"] > 1 or (experts and row["tensor"] == 1):
            return ValueError, "adds up over all elements"
    if row["optimizer"] == "lbfgs" and experts:
        return ValueError, "experts are on another mesh"
    if row["optimizer"] == "adafactor" and (row["tensor"] > 1 or row["engine"] == "fsdp2"):
        return RuntimeError, "no valid strategy preserves this placement"  # torch's, for any DTensor
    return None


def _of_degrees(row: dict) -> Refusal:
    tensor = row["tensor"]
    if tensor > 1 and row["shard"] == 1 and tensor < combinations.RANKS:
        return ValueError, "copies that are not sharded"
    if tensor > 1 and row["engine"] == "fsdp1":
        return ValueError, "ParallelismConfig is only compatible"  # Accelerate's
    if tensor > 1 and row["engine"] == "fsdp2" and row["shard"] == 1:
        return ValueError, "no dimension for FSDP to shard across"  # Accelerate's
    return None


def _of_states(row: dict) -> Refusal:
    part = row["engine"] == "none" or (row["engine"] == "fsdp1" and row["expert"] > 1)
    return (ValueError, "let FSDP shard the model") if part and row["resume"] != "none" else None


def _of_other_degree(row: dict) -> Refusal:
    # Clients store fused weights in the form of one tensor degree.
    if row["engine"] == "fsdp2" and row["resume"] == "other" and row["expert"]:
        return ValueError, "Accelerate stores fused weights in the form of one tensor degree"
    return None


def pairwise(client: str = "loop") -> list[dict]:
    """Few combinations of a client that hold every pair of values that trains, then the same for refused ones."""
    train, refused = [], []
    for row in combinations.product({**DIMENSIONS, "client": [client]}, possible):
        (refused if refusal(row) else train).append(row)
    return [*combinations.choose(train), *combinations.choose(refused)]


def drawn(count: int, client: str = "loop") -> list[dict]:
    """``count`` possible combinations that train, always the same; the product is too large to list in a short test."""
    draw, found = random.Random(1), []
    while len(found) < count:
        row = {key: draw.choice(values) for key, values in DIMENSIONS.items() if key != "client"}
        row["client"] = client
        if possible(row) and refusal(row) is None:
            found.append(row)
    return found
