"""Checks of checkpoint directories: one directory for each save, and one for each part of the model."""

from __future__ import annotations

import os
import re
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from smddp.sagemaker.distributed.checkpoint.participants import Participants
from smddp.text import named_ranks

#: Directories of parts, which `DistributedFileSystemReader` joins.
PART_DIRECTORY = re.compile(r"tp\d+_ep\d+|tp\d+-\d+")


def agree(storage: Any, ranks: Participants) -> None:
    """Sets the directory of ``storage`` (DCP reader or writer) to the coordinator's. Collective with spread experts.

    Scripts name a directory for each expert rank. A shard group may contain several expert ranks, and they save one
    checkpoint together. The coordinator's directory stores it.
    """
    from smddp.sagemaker.state_handler import state

    if ranks.size == 1 or state.expert_mesh is None or not isinstance(storage, FileSystemReader | FileSystemWriter):
        return
    place = ranks.broadcast(os.fspath(storage.path))
    if place != os.fspath(storage.path):
        storage.path = storage.fs.init_path(place)


def check_same(storage: Any, ranks: Participants) -> None:
    """Raises ValueError on every rank if DCP's writers of the ranks write to different directories. Collective.

    Each rank would write its files into its own directory, and no directory would hold a whole checkpoint.
    """
    place = os.fspath(storage.path) if isinstance(storage, FileSystemWriter) else None
    ranks_of: dict[str | None, list[int]] = {}
    for rank, other in zip(ranks.ranks, ranks.exchange("saving", lambda: place)):
        ranks_of.setdefault(other, []).append(rank)
    if len(ranks_of) > 1:
        named = "; ".join(f"{named_ranks(each)}: {where}" for where, each in ranks_of.items())
        raise ValueError(
            f"saving: the ranks of one save name different directories, {named}. Choose the name on one rank and "
            "broadcast it, for example by torch.distributed.broadcast_object_list"
        )


def check_part(storage: Any, ranks: Participants, slices: int) -> None:
    """Raises ValueError on a coordinator whose directory name does not match the part that its group saves.

    Groups that name one directory would replace each other's files, and only directories of these names are joined.

    Args:
        slices: number of parts of the model, of which ``ranks`` save one.
    """
    from smddp.sagemaker.state_handler import state

    if slices == 1 or not ranks.is_coordinator or not isinstance(storage, FileSystemWriter):
        return
    place = os.fspath(storage.path)
    name = os.path.basename(place.rstrip("/"))
    own = []
    if state.is_initialized and (state.tp_size > 1 or state.ep_size > 1):
        own = [f"tp{state.tp_rank}_ep{state.ep_rank}"]
        if slices == state.tp_size:
            own.append(f"tp{slices}-{state.tp_rank}")
    if name in own or (not own and PART_DIRECTORY.fullmatch(name)):
        return
    raise ValueError(
        f"saving {place}: the process group of ranks {ranks.ranks} holds one of {slices} parts of the model, and other "
        f"groups would replace its files. Save without process_group, so that all ranks save together; or name the "
        f"directory {' or '.join(own) or 'tp{r}_ep{r}'}, as each group's own"
    )


def check_apart(storage: Any, ranks: Participants) -> None:
    """Raises ValueError if two of ``ranks``, which save one part each, write to one directory."""
    place = os.fspath(storage.path) if isinstance(storage, FileSystemWriter) else None
    places = ranks.exchange("saving", lambda: place)
    if place is not None and len(set(places)) < ranks.size:
        raise ValueError(
            f"saving {place}: the tensor-parallel ranks {ranks.ranks} save one part of the model each, and would "
            f"replace each other's files in {sorted(set(map(str, places)))}. Name a directory for each tensor rank, "
            "such as tp{degree}-{rank}"
        )
