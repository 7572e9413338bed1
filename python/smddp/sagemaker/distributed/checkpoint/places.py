"""One directory for one save, where the ranks that save name several."""

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
