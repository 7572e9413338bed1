"""Shared code of the client scripts: the job's data as a dataset, and the check of the losses.

A script trains `training.Model` through its framework on every rank of a torchrun job and ends with
`check`; it exits 0 only when every step's mean loss is the one process's.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from training import ROWS, STEPS, assert_same, batch, make_model, mean_over_ranks, one_process

__all__ = ["BACKEND", "LEARNING_RATE", "PER_RANK", "STEPS", "Rows", "check", "make_model", "plain_sgd"]

BACKEND = os.environ.get("SMDDP_TEST_BACKEND", "smddp")
PER_RANK = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
LEARNING_RATE = 0.1


class Rows(Dataset):
    """Rows of all steps' batches in order: a step is ROWS consecutive rows, for any distribution over ranks."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = batch(index // ROWS)
        return {"x": x[index % ROWS], "labels": y[index % ROWS]}


def plain_sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def check(losses: list[torch.Tensor], backend_name: str = BACKEND) -> None:
    """Compares this rank's losses, averaged over the ranks, with the one process's."""
    assert dist.get_backend() == backend_name, f"{dist.get_backend()} was used, not {backend_name}"
    assert_same([mean_over_ranks(loss) for loss in losses], one_process(optimizer=plain_sgd))
    if dist.get_rank() == 0:
        print(f"{len(losses)} steps equal on {dist.get_world_size()} ranks of {dist.get_backend()}")
    dist.destroy_process_group()
