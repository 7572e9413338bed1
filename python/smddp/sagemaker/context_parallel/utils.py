"""Public functions: split a batch, and set the context group of attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smddp.sagemaker.context_parallel import chunks, record
from smddp.sagemaker.state_handler import state

__all__ = ["get_batch_for_cp_rank", "setup_transformer_engine_cp_groups"]

Batch = TypeVar("Batch")


def get_batch_for_cp_rank(batch: Batch) -> Batch:
    """Returns this rank's part of a batch that every rank of its context group holds in full.

    Splits each tensor into 2·cp chunks along dimension 1; context rank r gets chunks r and 2cp-r-1. Splits labels
    without a shift: the transformed model takes each chunk's last label from the rank that holds it.
    Without context parallelism, returns the batch unchanged.

    Args:
        batch: a tensor (batch, sequence, ...), or a tuple, list or mapping of tensors and None.

    Returns:
        the same, of (batch, sequence / cp, ...).

    Raises:
        ValueError: a tensor without dimension 1, or whose dimension 1 is not divisible by 2·cp.
        TypeError: a value that is not a tensor.
    """
    if state.cp_size == 1:
        return batch
    found: Any
    if isinstance(batch, Mapping):
        found = type(batch)({key: _part(value, repr(key)) for key, value in batch.items()})  # type: ignore[call-arg]
    elif isinstance(batch, (tuple, list)):
        found = type(batch)(_part(value, f"item {number}") for number, value in enumerate(batch))
    else:
        found = _part(batch, "the batch")
    return found


def _part(value: Any, name: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"get_batch_for_cp_rank: {name} must be a tensor or None, got {type(value).__name__}")
    if value.dim() < 2:
        raise ValueError(f"get_batch_for_cp_rank: {name} has no dimension 1 to cut: its shape is {tuple(value.shape)}")
    part = chunks.cut(value, state.cp_rank, state.cp_size)
    record.remember(part, state.cp_size)
    return part


def setup_transformer_engine_cp_groups(model: nn.Module, ranks: Sequence[int], pg: dist.ProcessGroup | None) -> None:
    """Set the context group of transformer-engine's attention layers in ``model``.

    Layers of transformers learn it from `tsm.transform`, so there is nothing to do for them, nor for a group of one.

    Args:
        model: the transformed model.
        ranks: global ranks of the group, in order.
        pg: the group, `tsm.state.cp_process_group`; None without context parallelism.

    Raises:
        ValueError: ``pg`` has other ranks than ``ranks``, or no layer of ``model`` can be split along the sequence.
    """
    if pg is None or pg.size() == 1:
        return
    from smddp.sagemaker.context_parallel.forward import is_split

    if list(ranks) != dist.get_process_group_ranks(pg):
        raise ValueError(f"ranks {list(ranks)} are not those of the group: {dist.get_process_group_ranks(pg)}")
    engines = [module for module in model.modules() if hasattr(module, "set_context_parallel_group")]
    if not engines and not any(is_split(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no attention that context parallelism over {pg.size()} ranks reaches: call "
            "tsm.transform() first"
        )
    stream = torch.cuda.Stream() if engines and torch.cuda.is_available() else None
    for module in engines:
        module.set_context_parallel_group(pg, list(ranks), stream)  # type: ignore[operator]
