"""States of a sharded model and its optimizer: whole, as in one process, and what one rank holds.

A part names what of it is sharded under `SHARD`; a sharded tensor is cut along its first axis, and the ranks of a shard
group hold the pieces in order, of which the last may be empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from smddp.formats import exact
from smddp.modelparallel.checkpointing.optimizer_state import HELD, IS_PARTIAL, merged
from smddp.modelparallel.tensor.split import Split

# {"rank", "degree", "names"}: of a model's part the names of what is sharded, of an optimizer's "number key".
SHARD = "_smp_shard"


@exact()
def whole(value: Any) -> Any:
    """``value`` with whole tensors, on the CPU, in place of sharded ones. Collective over the shard group."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().cpu()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value


def whole_model(state_dict: dict[str, Any], first: dict[str, str], splits: dict[str, Split]) -> dict[str, Any]:
    """Return a module's state as `whole` does, one tensor at a time.

    Args:
        first: the first name of each parameter, by each of its names.
        splits: splits over the tensor group by name.
    """
    made: dict[str, Any] = {}
    for name, value in state_dict.items():
        if first.get(name, name) in made:  # shared parameters pass once, and remain one tensor
            made[name] = made[first[name]]
        else:
            made[name] = whole(splits[name].gathered(value) if name in splits else value)
    return made


def local_model(state_dict: dict[str, Any], rank: int, degree: int) -> dict[str, Any]:
    """Return this rank's shards of a module's state."""
    names = [name for name, value in state_dict.items() if isinstance(value, DTensor)]
    own = {name: _local(value) for name, value in state_dict.items()}
    return {**own, IS_PARTIAL: True, SHARD: {"rank": rank, "degree": degree, "names": names}}


def local_optimizer(packed: dict[str, Any], rank: int, degree: int) -> dict[str, Any]:
    """Return this rank's shards of an optimizer's state."""
    names: list[str] = []
    own: dict[int, Any] = {}
    for number, values in packed["state"].items():
        names += [f"{number} {key}" for key, value in values.items() if isinstance(value, DTensor)]
        own[number] = {key: _local(value) for key, value in values.items()}
    return {**packed, "state": own, IS_PARTIAL: True, SHARD: {"rank": rank, "degree": degree, "names": names}}


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


# ---- back ----


def own_piece(value: torch.Tensor, like: DTensor, is_piece: bool) -> DTensor:
    """Return a tensor with the layout of ``like`` from ``value``, this rank's piece or the whole tensor."""
    from smddp.sagemaker import dtensor_shards

    piece = value if is_piece else dtensor_shards.cut(value, like)
    return dtensor_shards.around(piece.to(like.to_local()), like)


def load_model(module: torch.nn.Module, values: dict[str, Any], names: Iterable[str], pieces: Iterable[str]) -> None:
    """Copy ``values`` of ``names`` into the module; those among ``pieces`` are this rank's pieces already."""
    pieces, state = set(pieces), module.state_dict()
    with torch.no_grad():
        for name in names:
            target, value = state[name], values[name]
            if isinstance(target, DTensor):
                target.to_local().copy_(own_piece(value, target, name in pieces).to_local())
            elif isinstance(target, torch.Tensor):
                target.copy_(value)


def for_optimizer(state: dict[Any, Any], pieces: Iterable[str], parameters: dict[Any, Any]) -> dict[Any, Any]:
    """Return an optimizer's ``state`` with this rank's pieces in place of whole tensors.

    Args:
        pieces: "number key" of tensors that are pieces already.
        parameters: by their number in ``state``.
    """
    pieces = set(pieces)

    def piece(number: Any, key: str, value: Any) -> Any:
        like, is_piece = parameters[number], f"{number} {key}" in pieces
        # State with the shape of the parameter is sharded like the parameter.
        if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and (is_piece or value.shape == like.shape):
            return own_piece(value, like, is_piece)
        return value

    return {n: {key: piece(n, key, value) for key, value in values.items()} for n, values in state.items()}


def check_place(loaded: dict[str, Any], rank: int, degree: int, what: str) -> None:
    """Raise ValueError where ``loaded`` is another rank's part."""
    shard = loaded.get(SHARD)
    if shard is not None and (shard["rank"], shard["degree"]) != (rank, degree):
        raise ValueError(
            f"this part of {what} was saved by rank {shard['rank']} of {shard['degree']} that share the parameters, "
            f"and this is rank {rank} of {degree}; resume_from_checkpoint() finds what a rank needs"
        )


# ---- files ----


def fits(part: dict[str, Any], shared: Any) -> bool:
    """Return True if this rank can load a partial state unchanged; ``shared``: the model's sharding or None."""
    shard = part.get(SHARD)
    if shard is None or shared is None:
        return shard is None and shared is None
    return (shard["rank"], shard["degree"]) == (shared.rank, shared.degree)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of files of parts, in order of the numbers in them."""
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def joined_model(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of several parts of a model, in order: sharded tensors are put together."""
    if not any(SHARD in part for part in parts):
        found: dict[str, Any] = {}
        for part in parts:
            found |= part
        return found
    sharded = parts[0][SHARD]["names"]
    found = {name: value for name, value in parts[0].items() if name not in (SHARD, *sharded)}
    made: dict[int, torch.Tensor] = {}
    for name in sharded:
        # Shared tensors remain one tensor.
        key = parts[0][name].untyped_storage().data_ptr()
        if key not in made or not key:
            made[key] = torch.cat([part[name] for part in parts])
        found[name] = made[key]
    return found


def joined_optimizer(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state of several parts of an optimizer, in order: sharded tensors are put together."""
    if not any(SHARD in part for part in parts):
        return merged(parts)
    sharded = set(parts[0][SHARD]["names"])
    state = {
        number: {
            key: torch.cat([part["state"][number][key] for part in parts]) if f"{number} {key}" in sharded else value
            for key, value in values.items()
        }
        for number, values in parts[0]["state"].items()
    }
    return {key: value for key, value in parts[0].items() if key not in (SHARD, IS_PARTIAL, HELD)} | {"state": state}
