"""Loads FSDP1's sharded optimizer state, by a process group of the caller's choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import optimizer as torch_optimizer
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from smddp.sagemaker import in_place
from smddp.sagemaker.distributed.checkpoint import places
from smddp.sagemaker.distributed.checkpoint.participants import Participants
from smddp.sagemaker.distributed.checkpoint.state_dict_loader import load
from smddp.sagemaker.distributed.checkpoint.tensor_rank_parts import part_shape
from smddp.sagemaker.private_names import FROM_SHARDS, SHARD, SHARDED_GROUP, is_sharded_tensor


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: dcp.StorageReader,
    planner: dcp.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Reads an optimizer's state out of a sharded checkpoint, cut as the parameters are.

    torch's function of the same name cuts it over the whole world, and has no ``process_group``; under hybrid
    sharding each replica needs it over its own shard group.

    Args:
        model_state_dict: ``model.state_dict()`` under SHARDED_STATE_DICT.
        optimizer_key: the checkpoint's entry with the optimizer's state, as `FSDP.optim_state_dict` makes it.
        storage_reader: DCP reader of the checkpoint.
        planner: DCP load planner.
        process_group: the ranks that load; the default group if None.

    Returns:
        {optimizer_key: state}, to be given to `FSDP.optim_state_dict_to_load`.

    Raises:
        ValueError: the checkpoint has no such entry.
        FileNotFoundError: as `load` does.
    """
    places.agree(storage_reader, Participants(process_group))
    metadata = storage_reader.read_metadata()
    paths: dict[str, tuple] = metadata.planner_data or {}
    wanted = {name: path for name, path in paths.items() if path[0] == optimizer_key}
    if not wanted:
        raise ValueError(
            f"the checkpoint has no entry {optimizer_key!r}; it has {sorted({str(path[0]) for path in paths.values()})}"
        )
    state: dict[Any, Any] = {}
    for name, path in wanted.items():
        entry = metadata.state_dict_metadata[name]
        value: Any = "<bytes>"
        if isinstance(entry, TensorStorageMetadata):
            like = next((model_state_dict[part] for part in path[1:] if part in model_state_dict), None)
            value = _empty(entry, like)
        _put(state, path, value)
    reader = cast(dcp.StorageReader, _Kept(storage_reader))  # it answers as the caller's does
    load(state, storage_reader=reader, planner=planner, process_group=process_group)
    return state


def replace_in_torch() -> Callable[[], None]:
    """Replaces torch's function; returns an undo function."""
    return in_place.wrap(torch_optimizer.load_sharded_optimizer_state_dict, lambda _: load_sharded_optimizer_state_dict)


class _Kept:
    """The caller's reader, whose place and metadata a load without checkpoint_id must not forget."""

    def __init__(self, reader: dcp.StorageReader) -> None:
        self._reader = reader

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def _put(state: Any, path: tuple, value: Any) -> None:
    """Sets ``state[path[0]][path[1]]...``; whole numbers in the path are places in lists."""
    for part, following in itertools.pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(state, list):
            state.extend([None] * (part + 1 - len(state)))
            state[part] = empty if state[part] is None else state[part]
            state = state[part]
        else:
            state = state.setdefault(part, empty)
    if isinstance(state, list):
        state.extend([None] * (path[-1] + 1 - len(state)))
    state[path[-1]] = value


def _empty(entry: TensorStorageMetadata, like: Any) -> torch.Tensor:
    """A tensor to load ``entry`` into, cut as ``like`` is where their sizes agree, and whole otherwise."""
    dtype, size = entry.properties.dtype, torch.Size(entry.size)
    if isinstance(like, DTensor) and size in (like.shape, part_shape(like)):
        local = torch.empty_like(like.to_local(), dtype=dtype)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    if is_sharded_tensor(like) and like.size() == size:
        shard_of = SHARD.get()
        shards = [shard_of(torch.empty_like(s.tensor, dtype=dtype), s.metadata) for s in like.local_shards()]
        described = like.metadata()
        properties = described.tensor_properties
        described = type(described)(
            shards_metadata=described.shards_metadata,
            size=described.size,
            tensor_properties=type(properties)(dtype=dtype, layout=properties.layout),
        )
        return FROM_SHARDS.get()(shards, described, process_group=SHARDED_GROUP.of(like))
    if isinstance(like, torch.Tensor) and not (isinstance(like, DTensor) or is_sharded_tensor(like)):
        return torch.empty(size, dtype=dtype, device=like.device)
    return torch.empty(size, dtype=dtype)
