"""Start of a sharding layer: default group from the launcher's environment, subgroups, agreement on configuration."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from typing import Any

import torch.distributed as dist

from smddp.launch.environment import complete
from smddp.text import named_ranks


def make_default_group(caller: str, backend: str = "smddp") -> None:
    """Makes the default group from the launcher's environment. caller: the function that the error names."""
    if complete() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        dist.init_process_group(backend)
        return
    raise RuntimeError(
        f"{caller} found neither a process group nor a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR, "
        "MASTER_PORT; Open MPI's, MPICH's or Slurm's): start the script with `torchrun --nproc-per-node 8 script.py`, "
        "or call "
        f'dist.init_process_group("{backend}", ...) first'
    )


def agree(values: dict[str, Any], caller: str) -> list[str]:
    """Returns every rank's host. Raises ValueError unless all ranks called ``caller`` with the same ``values``."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (socket.gethostname(), digest))
    if len({other for _, other in found}) > 1:
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, values)
        raise ValueError(f"{caller} was given different configurations: {_differences(everything)}")
    return [host for host, _ in found]


def _differences(everything: list[dict[str, Any]]) -> str:
    """Returns the keys in which the configurations differ, with the ranks of each value."""
    texts = []
    for key in everything[0]:
        ranks: dict[Any, list[int]] = {}
        for rank, given in enumerate(everything):
            ranks.setdefault(given[key], []).append(rank)
        if len(ranks) > 1:
            held = (f"{value!r} on {named_ranks(who)}" for value, who in ranks.items())
            texts.append(f"{key} is {' and '.join(held)}")
    return "; ".join(texts)


def subgroup(rank_lists: list[list[int]]) -> dist.ProcessGroup:
    """Returns this rank's group among ``rank_lists``, which cover the world. Every rank makes all groups."""
    if len(rank_lists) == 1:
        world = dist.group.WORLD
        assert world is not None  # checked by the callers
        return world
    mine, _ = dist.new_subgroups_by_enumeration(rank_lists)
    assert isinstance(mine, dist.ProcessGroup)  # the lists cover the world
    return mine
