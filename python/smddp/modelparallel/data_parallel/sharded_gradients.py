"""Norms of gradients that are sharded over a shard group."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sharded(gradients: list[torch.Tensor]) -> bool:
    """Return True if the gradients are shards, as all are under fully_shard."""
    return bool(gradients) and isinstance(gradients[0], DTensor)


def pieces(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's local shard of each gradient, without a copy."""
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]


def plain(value: torch.Tensor) -> torch.Tensor:
    """Return a scalar as a plain tensor; reduces a scalar of pieces over the ranks, collectively."""
    return value.full_tensor() if isinstance(value, DTensor) else value


@torch.no_grad()
def norm(
    gradients: list[torch.Tensor], norm_type: float, counted: list[torch.Tensor], tensor_group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the norm of the whole gradients, a plain tensor. Collective over the shard group and ``tensor_group``.

    Args:
        counted: the gradients that this rank of the tensor group adds.
    """
    assert isinstance(gradients[0], DTensor)  # checked by `sharded`
    mesh = gradients[0].device_mesh
    # An empty shard has no maximum.
    held = [each for each in pieces(counted) if each.numel()]
    largest = math.isinf(norm_type)
    own = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    if held:
        norms = torch.stack([torch.linalg.vector_norm(each, norm_type, dtype=torch.float64) for each in held])
        own = norms.max() if largest else (norms**norm_type).sum()
    for group in (mesh.get_group(mesh.ndim - 1), tensor_group):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(own, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return (own if largest else own ** (1.0 / norm_type)).to(torch.float32)
