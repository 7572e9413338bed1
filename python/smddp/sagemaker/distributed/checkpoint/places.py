"""One directory for one save: ranks that name different ones are an error, or follow the coordinator."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from smddp.sagemaker.distributed.checkpoint.agreement import Participants


def agree(storage: Any, ranks: Participants) -> None:
    """Let ``storage``, DCP's reader or writer, lie where the coordinator's does. Collective with spread experts.

    Scripts name a directory for each expert rank. Here the ranks of a shard group may be of several expert ranks, and
    what they save together is one checkpoint: it lies in the directory of the coordinator, and is read from there.
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
        named = "; ".join(
            f"rank{'s' * (len(each) > 1)} {', '.join(map(str, each))}: {where}" for where, each in ranks_of.items()
        )
        raise ValueError(
            f"saving: the ranks of one save name different directories, {named}. Choose the name on one rank and "
            "broadcast it, for example by torch.distributed.broadcast_object_list"
        )
