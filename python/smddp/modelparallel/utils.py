"""Helpers of published scripts: the axis of a shared parameter, a log line, and checks of a model's values."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.state import state
from smddp.modelparallel.tensor.split import split_of

log = logging.getLogger("smddp.modelparallel")


def get_distribution_axis(parameter: Any) -> int | None:
    """Return the axis along which a tensor group shares ``parameter``; None if every rank holds all of it."""
    split = split_of(parameter)
    return None if split is None else split.dim


def rmsg(*message: Any) -> None:
    """Log ``message`` with this process's rank."""
    log.info("rank %s: %s", "?" if state.ranks is None else state.ranks.rank, " ".join(map(str, message)))


def dump_model(model: Any, path: Any) -> None:
    """Write the tensors of a DistributedModel's whole state to ``path`` on rank 0. Collective over all ranks."""
    values = _tensors(model.state_dict())
    if state.made("dump_model()")[1].rank == 0:
        torch.save(values, path)
    dist.barrier()


def verify(model: Any, path: Any) -> None:
    """Compare the whole state of a DistributedModel with a file of `dump_model`. Collective over the pipeline.

    Raises AssertionError for tensors that differ.
    """
    torch.testing.assert_close(_tensors(model.state_dict()), torch.load(path))


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in values.items() if isinstance(value, torch.Tensor)}
