"""Gradient-norm clipping for all combinations of sharding and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from smddp.sagemaker.private_names import handle_of

__all__ = ["clip_grad_norm_"]


@dataclass
class _Part:
    """Gradients sharded over the same groups: each element is on one rank of every group."""

    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device  # where collectives of these groups run
    gradients: list[torch.Tensor] = field(default_factory=list)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients of ``model`` so that their norm over all ranks is at most ``max_norm``.

    The norm equals that of the same model in one process. Each element counts once: shards of FSDP and tensor
    parallelism are summed over ranks, copies are not. The model may be wrapped by FSDP1, `fully_shard`, activation
    checkpointing and offloading, or unwrapped. Collective over all ranks, including ranks without gradients. Call it
    after backward, outside of `no_sync`.

    Args:
        model: the whole model, as given to the optimizer.
        max_norm: the largest norm, >= 0.
        norm_type: p of the p-norm, > 0; ``inf`` for the largest absolute value.

    Returns:
        The norm before clipping: a scalar tensor in float32 (float64 for float64 gradients), equal on every rank;
        0 without gradients.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``max_norm`` or ``norm_type`` out of range, or FSDP gradients that are not reduced yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"clip_grad_norm_ takes the model, not {type(model).__name__}: the norm needs its sharding")
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be a number >= 0")
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be > 0, or inf")
    parts = _parts(model)
    # From the parameters, since a rank without gradients must compute in the same type as the others.
    double = any(p.dtype == torch.float64 for p in model.parameters())
    total = _total(parts, norm_type, torch.float64 if double else torch.float32)
    # Multiply by 1 if no clipping is needed: a check of the norm on the host would synchronize the GPU.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for part in parts:
        for gradient in part.gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return total


def _parts(model: nn.Module) -> list[_Part]:
    """This rank's gradients by how they are cut. Every rank finds the same parts, also where it has no gradient."""
    parts: dict[tuple[dist.ProcessGroup, ...], _Part] = {}

    def part_of(groups: list[dist.ProcessGroup], device: torch.device) -> list[torch.Tensor]:
        cut = tuple(group for group in groups if group.size() > 1)
        return parts.setdefault(cut, _Part(cut, device)).gradients

    flattened: set[int] = set()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = handle_of(module)
        if handle is not None:
            flattened |= {id(handle.flat_param), *map(id, handle.flat_param._params or ())}
            computes_on = module.compute_device
            assert computes_on is not None  # a unit that has flattened parameters knows it
            for groups, gradient in _flat(handle):
                part_of(groups, computes_on).extend([gradient] if gradient is not None else [])
    for parameter in model.parameters():
        if id(parameter) in flattened or not parameter.requires_grad:
            continue
        device, groups = parameter.device, []
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            device = torch.device(parameter.device_mesh.device_type)
            groups = _groups(parameter.device_mesh, parameter.placements)
            if gradient is not None:
                assert isinstance(gradient, DTensor)  # as its parameter is
                gradient = _like(parameter, gradient).to_local()
        part_of(groups, device).extend([gradient] if gradient is not None else [])
    return list(parts.values())


def _groups(mesh, placements) -> list[dist.ProcessGroup]:
    """Returns the groups over which a tensor is sharded, not copied."""
    return [mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]


def _like(parameter: DTensor, gradient: DTensor) -> DTensor:
    """The gradient laid out as its parameter is; it may still be a sum in parts."""
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def _flat(handle: Any) -> Iterator[tuple[list[dist.ProcessGroup], torch.Tensor | None]]:
    """(groups, gradient on this rank) of every parameter that FSDP1 has flattened into a unit, by its handle."""
    flat = handle.flat_param
    if not flat.requires_grad and not handle._use_orig_params:
        return
    sharded = [handle.process_group] if handle.uses_sharded_strategy else []
    whole = None if handle._use_orig_params else flat.grad
    if whole is not None:
        _check_reduced(whole.numel(), flat.numel())
    for index, (extension, info) in enumerate(zip(flat._param_extensions, flat._shard_param_infos)):
        # FSDP1 stores the DTensor layout of a tensor-parallel parameter.
        tensor = _groups(extension.mesh, extension.placements) if extension is not None else []
        if handle._use_orig_params:
            assert flat._params is not None  # the original ones
            gradient = flat._params[index].grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient is not None and sharded:
                _check_reduced(gradient.numel(), info.numel_in_shard or 0)
        elif whole is None or not info.in_shard:
            gradient = None
        else:
            assert info.offset_in_shard is not None and info.numel_in_shard is not None  # as it is in the shard
            gradient = whole.narrow(0, info.offset_in_shard, info.numel_in_shard)
        yield [*sharded, *tensor], gradient


def _check_reduced(gradients: int, parameters: int) -> None:
    if gradients != parameters:
        raise ValueError(
            f"this rank holds {parameters} elements of a parameter under FSDP, and {gradients} of its gradient: the "
            "last backward ran in no_sync(); clip after the backward that reduces the gradients"
        )


def _total(parts: list[_Part], norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns the norm of all gradients on all ranks."""
    if not parts:
        return torch.zeros((), dtype=dtype)
    sums = torch.stack([_local(part, norm_type, dtype, parts[0].device) for part in parts])
    # One collective for each group: all parts that are cut over it go together.
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, part in enumerate(parts):
        for group in part.groups:
            groups.setdefault(group, []).append(index)
    largest = math.isinf(norm_type)
    for group, indices in groups.items():
        cut = sums[indices]
        dist.all_reduce(cut, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
        sums[indices] = cut
    return sums.max() if largest else sums.sum() ** (1.0 / norm_type)


def _local(part: _Part, norm_type: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The largest absolute value, or the sum of p-th powers, of the gradients on this rank."""
    # In `dtype`, as half precision would lose the norm of many small gradients.
    each = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device) for g in part.gradients if g.numel()]
    if not each:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(each)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
