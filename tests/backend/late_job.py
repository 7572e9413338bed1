"""A job of three ranks that trains with DDP: first without a straggler, then with one rank late in every backward pass.

Its only children are the ranks, like those of a launcher. Writes the findings of both halves as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import smddp
import torch
import torch.distributed as dist
from smddp._register import register
from smddp.observability import status, stragglers, watcher
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS, LATE, STEPS, SECONDS = 3, 2, 50, 0.2


def train(model: Any, steps: int, on_step: Any) -> int:
    """Trains until rank 0's `on_step` returns true. Returns the number of steps."""
    for step in range(1, steps + 1):
        model(torch.ones(2, 64)).sum().backward()
        enough = torch.tensor([float(dist.get_rank() == 0 and on_step())])
        dist.broadcast(enough, 0)
        if enough:
            return step
    return steps


def rank_main(rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    register()
    dist.init_process_group("cpu:smddp", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
    found: dict[str, Any] = {}
    train(model, STEPS, lambda: False)
    dist.barrier()
    if rank == 0:
        found["without"] = [str(one) for one in (*watcher._watch.compare(), *stragglers.find(status.job()))]
    dist.barrier()
    if rank == LATE:
        layers[3].register_full_backward_hook(lambda *_: time.sleep(SECONDS))
    found["steps"] = train(model, STEPS, lambda: bool(watcher._watch._named))
    found["first"] = bool(status.job()) == (rank == 0)
    smddp.dump(f"{folder}/dump-{rank}.json")
    dist.barrier()
    if rank == 0:
        found["status"] = [str(one) for one in stragglers.find(status.job())]
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def forked(rank_main: Callable[..., None], size: int, *given: Any) -> int:
    """Runs `size` ranks as separate processes. Returns the largest exit status."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(forked(rank_main, RANKS, Path(sys.argv[1])))
