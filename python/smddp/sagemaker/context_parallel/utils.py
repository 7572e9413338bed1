"""What scripts call: cutting a batch, and telling attention layers which ranks hold the rest of the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from smddp.sagemaker.context_parallel import chunks, record
from smddp.sagemaker.state_handler import state

Batch = TypeVar("Batch")


def get_batch_for_cp_rank(batch: Batch) -> Batch:
    """This rank's part of a batch of which all ranks of its context group hold the whole.

    Each tensor is cut into 2·cp chunks along dimension 1, of which context rank r gets chunks r and 2cp-r-1. Labels
    are cut as they are, without a shift: the transformed model takes each chunk's last label from the rank that has it.
    Without context parallelism the batch is returned as it is.

    Args:
        batch: a tensor (batch, sequence, ...), or a tuple, list or mapping of such and of None.

    Returns:
        the same, of (batch, sequence / cp, ...).

    Raises:
        ValueError: a tensor without dimension 1, or one that 2·cp does not divide.
        TypeError: something that is no tensor.
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
    """Tell transformer-engine's attention layers in ``model`` their context group.

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
