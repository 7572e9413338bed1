"""Loads checkpoints into state dicts of any layout."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from smddp.sagemaker.distributed.checkpoint import keys, layout, places, reshaped
from smddp.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
from smddp.sagemaker.distributed.checkpoint.participants import Participants

__all__ = ["load"]


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike | None = None,
    storage_reader: dcp.StorageReader | None = None,
    planner: dcp.LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Loads a checkpoint into ``state_dict``, in place. Collective over ``process_group``.

    Tensors are filled where they are; each rank reads only the parts it holds, from whatever parts were saved, so a
    sharded checkpoint loads at any number of ranks, shard degree and tensor-parallel degree. Other values are
    replaced in the dictionary. A local checkpoint loads only at the degrees it was saved with.

    Args:
        state_dict: what to load; it may leave out top-level entries of the checkpoint.
        checkpoint_id: directory or `s3://` name.
        storage_reader: instead of (or with) ``checkpoint_id``; any DCP reader.
        planner: DCP load planner; torch's default if None.
        process_group: the ranks that load; the default group if None.
        check_keys_matched: compare the names asked for, over the ranks and with the checkpoint, before anything is
            read.
        coordinator_rank: global rank of the group; the default 0 means the group's first rank where the group does
            not hold rank 0.
        s3_region, s3client_config: for `s3://` names; see `S3FileSystem`.

    Raises:
        ValueError: neither ``checkpoint_id`` nor ``storage_reader``; names that do not match; a layout that cannot be
            resharded, with what to change.
        FileNotFoundError: no checkpoint, or one whose save did not end or that has lost files; names them.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(f"state_dict must be a dictionary, got {type(state_dict).__name__}")
    reader = _reader(checkpoint_id, storage_reader, s3_region, s3client_config)
    ranks = Participants(process_group, coordinator_rank)
    places.agree(reader, ranks)
    if isinstance(reader, DistributedFileSystemReader):
        reader.checks_files = ranks.is_coordinator
    where = str(getattr(reader, "checkpoint_id", None) or getattr(reader, "path", reader))
    stateful = {key: value for key, value in state_dict.items() if isinstance(value, Stateful)}
    asked = {key: value.state_dict() if key in stateful else value for key, value in state_dict.items()}
    is_local = layout.find_local(asked) is not None
    into = layout.to_local(asked) if is_local else asked

    def read_and_check() -> tuple[list[str], str]:
        metadata = reader.read_metadata()
        found.append(metadata)
        layout.check_fits(layout.of(metadata), asked, where)
        names = _names(into)
        if check_keys_matched:
            keys.check(set(names), metadata, where)
        _check_whole(set(names), metadata, where)
        return names, hashlib.sha256("\n".join(names).encode()).hexdigest()

    seen: list[str] = []
    found: list[Metadata] = []

    def record_names() -> str:
        names, digest = read_and_check()
        seen.extend(names)
        return digest

    digests = ranks.exchange(f"loading {where}", record_names)
    if check_keys_matched and len(set(digests)) > 1:
        keys.check_same(ranks.exchange(f"loading {where}", lambda: seen), ranks.ranks)

    with warnings.catch_warnings():
        # Without a process group DCP warns about single-process loading, which is intended here.
        warnings.filterwarnings("ignore", message="torch.distributed is")
        rest, others = reshaped.split(into, found[0])
        dcp.load(rest, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.alone)
        for name, (target, shape) in others.items():
            whole = torch.empty(shape, dtype=target.dtype)
            dcp.load({name: whole}, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
            reshaped.fill(target, whole.view(target.size()))
    if is_local or others:
        layout.take_values(asked, rest)
    for key, value in asked.items():
        if key in stateful:
            stateful[key].load_state_dict(value)
        else:
            state_dict[key] = value


def _reader(checkpoint_id: Any, reader: Any, s3_region: str | None, s3client_config: Any) -> dcp.StorageReader:
    if reader is None:
        if checkpoint_id is None:
            raise ValueError("give checkpoint_id (a directory or an s3:// name) or storage_reader")
        return DistributedFileSystemReader(checkpoint_id, s3_region=s3_region, s3client_config=s3client_config)
    reader.reset(checkpoint_id)
    return reader


def _names(state_dict: dict[str, Any]) -> list[str]:
    """Returns DCP's names of the entries of ``state_dict``, sorted."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state_dict)
    return sorted(planner.state_dict)


def _check_whole(names: set[str], metadata: Metadata, where: str) -> None:
    """Rejects a checkpoint with gaps in the requested tensors, which DCP would ignore."""
    for name in names:
        entry = metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        held, size = sum(math.prod(chunk.sizes) for chunk in entry.chunks), math.prod(entry.size)
        if held < size:
            raise ValueError(
                f"{where} holds {held} of the {size} elements of {name}: it was saved by tensor-parallel ranks, each "
                "into a separate directory, and some directories are missing. Keep the directories, named "
                "tp{r}_ep{r}, side by side"
            )
