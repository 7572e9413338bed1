"""A job of three ranks that trains with DDP: at first all alike, then one of them is late in every backward pass.

Its ranks are its children alone, as a launcher's are. Prints what each half showed, as JSON.
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
    """Steps that were made until rank 0's `on_step` was true, or all."""
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
    told: dict[str, Any] = {}
    train(model, STEPS, lambda: False)
    dist.barrier()
    if rank == 0:
        told["without"] = [str(one) for one in (*watcher._watch.compare(), *stragglers.find(status.job()))]
    dist.barrier()
    if rank == LATE:
        layers[3].register_full_backward_hook(lambda *_: time.sleep(SECONDS))
    told["steps"] = train(model, STEPS, lambda: bool(watcher._watch._named))
    told["first"] = bool(status.job()) == (rank == 0)
    smddp.dump(f"{folder}/dump-{rank}.json")
    dist.barrier()
    if rank == 0:
        told["status"] = [str(one) for one in stragglers.find(status.job())]
        (folder / "told.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def forked(rank_main: Callable[..., None], size: int, *given: Any) -> int:
    """So many ranks as processes of their own. Returns the worst of their exit statuses."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(forked(rank_main, RANKS, Path(sys.argv[1])))
