"""Tensors whose shape in the checkpoint differs from the requested shape.

Tensor parallelism stores some fused weights with a dimension for their parts, (in, 3, out) for (in, 3 x out), so a
checkpoint from another tensor-parallel degree may have neighbouring dimensions joined or split. The elements are the
same and in the same order. DCP moves only between equal shapes, so these are read whole, one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from smddp.sagemaker.private_names import is_sharded_tensor


def split(state_dict: dict[str, Any], metadata: Metadata) -> tuple[dict[str, Any], dict[str, tuple[Any, torch.Size]]]:
    """Separates the tensors saved in another shape from ``state_dict``.

    Returns:
        The remaining entries, in new dictionaries where entries were removed; and the removed tensors by DCP name,
        each with its saved shape.
    """
    taken: dict[str, tuple[Any, torch.Size]] = {}

    def rest(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        before = len(taken)
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict):
                kept[key] = rest(value, f"{name}.")
                continue
            saved = metadata.state_dict_metadata.get(name)
            if isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata):
                if saved.size != value.size() and is_joined(saved.size, value.size()):
                    taken[name] = (value, saved.size)
                    continue
            kept[key] = value
        return kept if len(taken) > before else values

    return rest(state_dict, ""), taken


def is_joined(one: Sequence[int], other: Sequence[int]) -> bool:
    """Returns True if one shape equals the other with adjacent dimensions joined."""
    long, short = (one, other) if len(one) > len(other) else (other, one)
    if math.prod(long) != math.prod(short):
        return False
    at = 0
    for size in short:
        product = 1
        while product < size and at < len(long):
            product *= long[at]
            at += 1
        if product != size:
            return False
    return all(size == 1 for size in long[at:])


def fill(target: Any, whole: torch.Tensor) -> None:
    """Copies this rank's part of ``whole``, which every rank holds, into ``target``, of the same shape."""
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        every = DTensor.from_local(whole.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
        target.to_local().copy_(every.redistribute(mesh, target.placements).to_local())
    elif is_sharded_tensor(target):
        for shard in target.local_shards():
            part = whole
            for dim, (offset, size) in enumerate(zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)):
                part = part.narrow(dim, offset, size)
            shard.tensor.copy_(part)
    else:
        target.copy_(whole)
