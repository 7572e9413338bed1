"""The job of docs/guides/debug-a-hang.md: rank 1 is late in every step, and rank 3 hangs before the last call."""

import os
import time

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, SLOW, HANGS = 16, 1, 3


def read_batch(rank, step):
    if rank == HANGS and step == STEPS:
        time.sleep(3600)
    time.sleep(0.045 if rank == SLOW else 0.005)
    return torch.ones(8, 256)


def main():
    dist.init_process_group("cpu:smddp")
    rank = dist.get_rank()
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    model = DistributedDataParallel(model, bucket_cap_mb=0.5)
    if rank == 0:
        with open("pids", "w") as file:
            file.write(" ".join(map(str, pids)))
    for step in range(STEPS + 1):
        model(read_batch(rank, step)).sum().backward()


if __name__ == "__main__":
    main()
