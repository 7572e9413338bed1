"""Layout record of a checkpoint: a *sharded* checkpoint loads in every layout, a *local* one only in its layout.

An extra attribute of DCP's metadata stores the record; plain torch ignores it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_ATTRIBUTE = "smp_layout"

SHARDED = "sharded"
LOCAL = "local"


@dataclass(frozen=True)
class Cut:
    """Index of one rank's local tensors in the shard, tensor and expert dimensions."""

    shard_degree: int
    shard_rank: int
    tensor_degree: int
    tensor_rank: int
    expert_degree: int = 1
    expert_rank: int = 0


class LocalStateDict(dict):
    """A model's state dict made of this rank's own tensors; what holds one is saved and loaded as a local checkpoint.

    Attributes:
        cut: the `Cut` the tensors come from.
    """

    cut: Cut


def find_local(value: Any) -> LocalStateDict | None:
    """Returns the first local state dict inside ``value``."""
    if isinstance(value, LocalStateDict):
        return value
    children: Iterable = value.values() if isinstance(value, dict) else ()
    return next((found for child in children if (found := find_local(child)) is not None), None)


def to_local(value: Any) -> Any:
    """Replaces each DTensor in ``value`` by this rank's local tensor, which shares its memory."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: to_local(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and any(isinstance(child, (dict, list, tuple, DTensor)) for child in value):
        return type(value)(to_local(child) for child in value)
    return value


def take_values(target: Any, source: Any) -> None:
    """Copies the non-tensor entries of ``source``, made by `to_local`, back into the original dictionary."""
    for key, value in source.items():
        if isinstance(target.get(key), dict) and isinstance(value, dict):
            take_values(target[key], value)
        elif not isinstance(target.get(key), torch.Tensor):
            target[key] = value


def tensors(value: Any) -> Iterable[torch.Tensor]:
    """Yields every tensor inside nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from tensors(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from tensors(child)


def cuts(place: Any) -> bool:
    """Returns True for a sharding DTensor placement; FSDP2's strided shards do not subclass Shard."""
    return not (place.is_replicate() or place.is_partial())


def slices(state_dict: Any, ranks: list[int]) -> int:
    """Returns the number of parts of the model if ``ranks`` save one part: 1 unless a tensor has other ranks.

    So it is where each tensor-parallel rank saves with its own shard group.
    """
    members = set(ranks)
    most = 1
    for tensor in tensors(state_dict):
        if isinstance(tensor, DTensor) and any(cuts(place) for place in tensor.placements):
            holders = needed(tensor)
            most = max(most, len(holders) // max(1, len(holders & members)))
    return most


def needed(tensor: DTensor) -> set[int]:
    """Returns the ranks that hold one full copy of ``tensor`` together with this rank."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return set()
    index = tuple(slice(None) if cuts(place) else at for place, at in zip(tensor.placements, coordinate))
    return set(mesh.mesh[index].flatten().tolist())


def record(state_dict: Any, ranks: list[int]) -> dict[str, Any]:
    """The layout of ``state_dict`` as saved by ``ranks``, in plain values."""
    local = find_local(state_dict)
    if local is not None:
        return {"kind": LOCAL, "ranks": ranks, **vars(local.cut)}
    return {"kind": SHARDED, "ranks": ranks, "slices": slices(state_dict, ranks)}


def attach(metadata: Any, layout: dict[str, Any]) -> None:
    """Puts ``layout`` into DCP's ``metadata``."""
    setattr(metadata, _ATTRIBUTE, layout)


def of(metadata: Any) -> dict[str, Any]:
    """The layout in ``metadata``; that of a plain DCP checkpoint if there is none."""
    return getattr(metadata, _ATTRIBUTE, None) or {"kind": SHARDED, "slices": 1}


def check_fits(saved: dict[str, Any], state_dict: Any, where: str) -> None:
    """Rejects a checkpoint whose layout ``saved`` cannot be converted to the layout of ``state_dict``.

    Raises:
        ValueError: a local checkpoint for another layout, or one kind given where the other is.
    """
    local = find_local(state_dict)
    if saved["kind"] == SHARDED:
        if local is not None:
            raise ValueError(
                f"{where} is a sharded checkpoint, but the state dict was made under SM_LOCAL_STATE_DICT: make it "
                "under StateDictType.SHARDED_STATE_DICT"
            )
        return
    if local is None:
        raise ValueError(
            f"{where} is a local checkpoint (shard {saved['shard_rank']} of {saved['shard_degree']}), but the state "
            "dict is not local: make it under sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT), in a run "
            f"with hybrid_shard_degree={saved['shard_degree']} and tensor_parallel_degree={saved['tensor_degree']}"
        )
    # Older checkpoints have no record of expert parallelism.
    saved = {"expert_degree": 1, "expert_rank": 0, **saved}
    for part in ("shard", "tensor", "expert"):
        key = "hybrid_shard_degree" if part == "shard" else f"{part}_parallel_degree"
        then, now = saved[f"{part}_degree"], getattr(local.cut, f"{part}_degree")
        if then != now:
            raise ValueError(
                f"{where} is a local checkpoint saved with {part} degree {then}, and this run has {part} degree {now}: "
                f"a local checkpoint loads only at the degree it was saved with. Set {key} to {then}, or save under "
                "StateDictType.SHARDED_STATE_DICT, which reshards"
            )
        then, now = saved[f"{part}_rank"], getattr(local.cut, f"{part}_rank")
        if then != now:
            raise ValueError(
                f"{where} holds {part} rank {then}'s part of a local checkpoint, and this is {part} rank {now}: give "
                "each rank the directory of its part (tp{r}_ep{r}_fsdp{r})"
            )
