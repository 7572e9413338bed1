"""A job of three ranks that trains with DDP in rounds, each in a new group.

In every second round one rank is late in the backward pass; in the others all ranks take equally long up to random
jitter. Prints a line of JSON for each round: the late rank, the number of steps, and the named ranks.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from late_job import forked
from smddp._register import register
from smddp.observability import status, stragglers, watcher
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, SECONDS = 3, 50, 0.2
# Seconds of a step without a late rank, and their jitter.
EVEN, JITTER = 0.1, 0.02


def named(group: str) -> list[int]:
    """Returns the ranks of the group that this process reported as late."""
    return [rank for name, rank in watcher._watch._named if name == group]


def round_of(late: int | None, bucket: float, chance: random.Random) -> dict[str, Any]:
    """Runs one round with all_reduces of `bucket` MB; only rank 0's findings count."""
    group = dist.new_group(list(range(RANKS)), backend="cpu:smddp")
    name = group.group_name
    rank = dist.get_rank()
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=bucket, process_group=group)

    def held(*_: Any) -> None:
        time.sleep(EVEN + chance.uniform(0, JITTER) if late is None else SECONDS * (rank == late))

    layers[3].register_full_backward_hook(held)
    steps = 0
    while steps < STEPS:
        steps += 1
        model(torch.ones(2, 64)).sum().backward()
        enough = torch.tensor([float(rank == 0 and late is not None and bool(named(name)))])
        dist.broadcast(enough, 0, group=group)
        if enough:
            break
    if rank == 0:
        watcher._watch.compare()
    found = {"late": late, "steps": steps, "named": named(name)}
    found["status"] = [one.rank for one in stragglers.find(status.job()) if one.group == name] if rank == 0 else []
    dist.barrier(group)
    dist.destroy_process_group(group)
    return found


def rank_main(rank: int, folder: Path, rounds: int, seed: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    register()
    dist.init_process_group("cpu:smddp", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    chance = random.Random(seed * RANKS + rank)
    for number in range(rounds):
        late = None if number % 2 else (seed + number // 2) % RANKS
        # Rounds with several all_reduces per step alternate with rounds with one.
        found = round_of(late, 25.0 if number % 4 >= 2 else 0.02, chance)
        if rank == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(forked(rank_main, RANKS, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
