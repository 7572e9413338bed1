"""Saves and loads of one tensor rank's part of the model, through torch's DCP functions.

Scripts written for SMP v2 call `torch.distributed.checkpoint.save_state_dict` with FSDP's process group, a global
coordinator rank and a separate directory for each tensor rank. That group holds only one tensor rank's part of each
parameter. Current torch expects a coordinator rank within the group, and tensors that the group holds in full. So
each tensor-parallel tensor is replaced, during the call, by this tensor rank's part over the ranks of the group. A
directory is then a complete checkpoint of one tensor rank: it loads at any shard degree and at its tensor degree.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from smddp.sagemaker.distributed.checkpoint import layout, places
from smddp.sagemaker.distributed.checkpoint.participants import CheckpointError, Participants
from smddp.sagemaker.parallel import DIMENSIONS
from smddp.sagemaker.state_handler import state

_TENSOR = DIMENSIONS[-1]


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's `save` and `save_state_dict`: saves this tensor rank's part if the group holds only that part.

    With FSDP's group at a shard degree of 1, the first copy saves, and other copies return None at once.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _save_state_dict(*args: Any, **kwargs: Any) -> Any:
        given = _bound(signature, args, kwargs)
        ranks = _participants(given)
        if ranks is None:
            return original(**given)
        if not ranks.leave_copies():
            return None
        if ranks.size == 1:
            given |= {"process_group": None, "no_dist": True}
        places.agree(given["storage_writer"], ranks)
        given["state_dict"], parts = _parts(
            given["state_dict"], lambda _, tensor: _beyond(tensor, ranks.ranks), fill=True
        )
        if parts:
            places.check_apart(given["storage_writer"], Participants(state.tp_process_group))
        _refuse_spread(given["state_dict"], ranks.ranks)
        return original(**given)

    return _save_state_dict


def loading(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps torch's `load` and `load_state_dict`: loads this tensor rank's part if the checkpoint is such a part.

    Raises:
        CheckpointError: another rank of the tensor group could not load its part.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def _load_state_dict(*args: Any, **kwargs: Any) -> None:
        given = _bound(signature, args, kwargs)
        ranks = _participants(given)
        if ranks is None:
            return original(**given)
        places.agree(given["storage_reader"], ranks)
        saved = _metadata(given["storage_reader"])
        asked = given["state_dict"]
        given["state_dict"], parts = _parts(asked, lambda name, tensor: _is_part(name, tensor, saved), fill=False)
        if not parts:
            given["state_dict"] = asked
            return original(**given)
        error: Exception | None = None
        try:
            original(**given)
        except Exception as raised:
            error = raised
        _all_or_none(error)
        for tensor, part in parts:
            _put_back(tensor, part)
        layout.take_values(asked, given["state_dict"])

    return _load_state_dict


def part_shape(tensor: DTensor) -> torch.Size | None:
    """Returns the shape of this tensor rank's part of ``tensor``; None without tensor parallelism."""
    names = tensor.device_mesh.mesh_dim_names or ()
    if not names or names[-1] != _TENSOR or not isinstance(tensor.placements[-1], Shard):
        return None
    dim, mesh = tensor.placements[-1].dim, tensor.device_mesh
    size, ranks, rank = tensor.shape[dim], mesh.size(mesh.ndim - 1), mesh.get_local_rank(_TENSOR)
    each = -(-size // ranks)
    shape = list(tensor.shape)
    shape[dim] = max(0, min(each, size - each * rank))
    return torch.Size(shape)


def _bound(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _participants(given: dict[str, Any]) -> Participants | None:
    """The ranks of a call that names its group; and its coordinator, where it is a global rank of the group, becomes
    one within it, as torch wants it.

    A number that could be either is taken for the global rank: all ranks give the same, so one rank coordinates.
    """
    group, wanted = given.get("process_group"), given.get("coordinator_rank", 0)
    if group is None or given.get("no_dist") or dist.get_rank(group) < 0:
        return None
    members = dist.get_process_group_ranks(group)
    if wanted in members:
        given["coordinator_rank"] = members.index(wanted)
    return Participants(
        group, members[given["coordinator_rank"]] if given["coordinator_rank"] < len(members) else wanted
    )


def _beyond(tensor: DTensor, ranks: list[int]) -> bool:
    """Returns True if ranks outside ``ranks``, such as other tensor ranks, hold parts of ``tensor``."""
    return part_shape(tensor) is not None and not layout.needed(tensor) <= set(ranks)


def _is_part(name: str, tensor: DTensor, saved: Metadata | None) -> bool:
    entry = saved.state_dict_metadata.get(name) if saved is not None else None
    if not isinstance(entry, TensorStorageMetadata) or entry.size == tensor.shape:
        return False
    return entry.size == part_shape(tensor)


def _refuse_spread(state_dict: dict[str, Any], ranks: list[int]) -> None:
    """Raise ValueError if ``ranks`` hold only some experts: torch would write a checkpoint with gaps."""
    if layout.slices(state_dict, ranks) > 1:
        raise ValueError(
            f"the ranks {ranks} hold some of the experts only, as those are spread over more ranks than FSDP's group: "
            "save with torch.sagemaker.distributed.checkpoint.state_dict_saver.save, into directories tp{r}_ep{r}"
        )


def _metadata(reader: Any) -> Metadata | None:
    try:
        return reader.read_metadata()
    except Exception:  # torch's call reports the error on every rank of the group
        return None


def _parts(
    values: dict[str, Any], wanted: Callable[[str, DTensor], bool], fill: bool, prefix: str = ""
) -> tuple[dict[str, Any], list[tuple[DTensor, torch.Tensor]]]:
    """``values`` with the part in place of each tensor that is ``wanted``; and the pairs of both.

    ``fill``: parts hold the tensors' values.
    """
    replaced, pairs = dict(values), []
    for key, value in values.items():
        if isinstance(value, dict):
            replaced[key], more = _parts(value, wanted, fill, f"{prefix}{key}.")
            pairs += more
        elif isinstance(value, DTensor) and wanted(f"{prefix}{key}", value):
            replaced[key] = _part(value, fill)
            pairs.append((value, replaced[key]))
    return replaced, pairs


def _interleaved(tensor: DTensor) -> bool:
    """Returns True if another mesh dimension shards the tensor-parallel dimension first, as in FSDP1's state dicts.

    A rank's rows are then outside its tensor rank's part.
    """
    *others, last = tensor.placements
    return any(type(place) is Shard and type(last) is Shard and place.dim == last.dim for place in others)


def _dim(place: Any) -> int:
    """Returns the dimension that a placement shards; strided shards have a private type."""
    return place.dim


def _part(tensor: DTensor, fill: bool) -> torch.Tensor:
    """Returns this tensor rank's part, sharded over the other dimensions; a view of the tensor where possible."""
    mesh, shape = tensor.device_mesh, part_shape(tensor)
    assert shape is not None  # only tensors that are cut are wanted
    local = tensor.to_local()
    if mesh.ndim == 1:
        return local
    names = tuple(mesh.mesh_dim_names or ())[:-1]
    root = state.mesh if set(names) <= set(DIMENSIONS) else state.expert_mesh
    assert root is not None  # whose part the tensor's mesh is
    rest = root[names]
    # FSDP2's strided shards record that the tensor dimension shards first; within the part, they are plain shards.
    cut: list[Any] = [Shard(_dim(p)) if layout.cuts(p) else Replicate() for p in tensor.placements[:-1]]
    if not _interleaved(tensor):
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, rest, cut, run_check=False, shape=shape, stride=stride)
    whole: list[Any] = [Replicate()] * rest.ndim
    values = _on_mesh(tensor).redistribute(mesh, [*whole, tensor.placements[-1]]).to_local() if fill else None
    if values is None:
        values = torch.empty(shape, dtype=local.dtype, device=mesh.device_type)
    part = DTensor.from_local(values, rest, whole, run_check=False).redistribute(rest, cut)
    return part


def _put_back(tensor: DTensor, part: torch.Tensor) -> None:
    """Copy the loaded values of ``part`` into ``tensor``."""
    if isinstance(part, DTensor) and _interleaved(tensor):
        mesh = tensor.device_mesh
        whole: list[Any] = [Replicate()] * (mesh.ndim - 1)
        values = part.redistribute(part.device_mesh, whole).to_local()
        ours = DTensor.from_local(values, mesh, [*whole, tensor.placements[-1]], run_check=False)
        tensor.to_local().copy_(ours.redistribute(mesh, tensor.placements).to_local())


def _on_mesh(tensor: DTensor) -> DTensor:
    """Moves ``tensor`` to its mesh's device: state dicts may be offloaded to the host."""
    mesh = tensor.device_mesh
    if tensor.to_local().device.type == mesh.device_type:
        return tensor
    local = tensor.to_local().to(mesh.device_type)
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _all_or_none(error: Exception | None) -> None:
    """Raise ``error``, or report the failed rank of the tensor group, before further communication over the group."""
    tensor_ranks = Participants(state.tp_process_group)
    texts = tensor_ranks.exchange("loading", lambda: None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in zip(tensor_ranks.ranks, texts) if text is not None}
    if failed:
        said = "; ".join(f"rank {rank}: {text.splitlines()[-1]}" for rank, text in failed.items())
        raise CheckpointError(f"other ranks of the tensor group could not load their parts: {said}", failed)
