"""Rank placement: its arithmetic, and the groups of this process.

The world is a grid of three letters: P (stages of the pipeline), T (ranks that share layers) and D (copies of the
model, "reduced data parallel"). A placement is an order of the letters; ranks are counted with the right-most letter
fastest. The ranks of every group ascend, and a rank's place in its group follows.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from smddp.smp.launcher import LAUNCHER
from smddp.torch.bootstrap import agree, make_default_group, subgroup

if TYPE_CHECKING:
    from smddp.smp.v1_keys import Config

_STRATEGIES = {"cluster": "DPT", "spread": "TPD"}

# The letters along which the ranks of a group differ.
GROUPS = {"pp": "P", "tp": "T", "rdp": "D", "dp": "DT", "mp": "PT"}


def letters(strategy: str) -> str:
    """Return the order of D, P and T for a placement strategy."""
    return _STRATEGIES.get(strategy, strategy)


def place(size: int, strategy: str, pipeline: int, tensor: int = 1) -> dict[str, list[list[int]]]:
    """Return all groups of ``size`` ranks by name ("pp", "tp", "rdp", "dp", "mp"): lists of ranks that cover the world.

    Raises ValueError if the degrees do not divide the world size.
    """
    if size % (pipeline * tensor):
        raise ValueError(
            f"{size} ranks do not fill 'pipeline_parallel_degree'={pipeline} times 'tensor_parallel_degree'={tensor}: "
            f"start a multiple of {pipeline * tensor} ranks"
        )
    extents = {"P": pipeline, "T": tensor, "D": size // (pipeline * tensor)}
    order = letters(strategy)
    cells = list(itertools.product(*(range(extents[letter]) for letter in order)))
    groups: dict[str, list[list[int]]] = {}
    for name, along in GROUPS.items():
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, cell in enumerate(cells):
            rest = tuple(index for letter, index in zip(order, cell) if letter not in along)
            found.setdefault(rest, []).append(rank)
        groups[name] = list(found.values())
    return groups


def mine(groups: dict[str, list[list[int]]], name: str, rank: int) -> list[int]:
    """Return the ranks of the group ``name`` that contains ``rank``."""
    return next(members for members in groups[name] if rank in members)


@dataclass(frozen=True)
class Ranks:
    """Ranks and groups of this process.

    Attributes:
        pp_ranks: the global ranks of this pipeline, in order of their stage.
        mail_group: a second group of the same ranks, for messages between stages: they never wait for a collective.
        object_group: a second group of all ranks, for the objects that a script sends.
        tp_ranks: the global ranks of this tensor group.
        order_group: second group of the tensor group's ranks, for messages about their order; None without stages.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    pp_rank: int
    pp_size: int
    tp_rank: int
    tp_size: int
    rdp_rank: int
    rdp_size: int
    dp_rank: int
    dp_size: int
    mp_rank: int
    mp_size: int
    pp_ranks: list[int]
    pp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    rdp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    mp_group: dist.ProcessGroup
    mail_group: dist.ProcessGroup
    object_group: dist.ProcessGroup
    tp_ranks: list[int] = field(default_factory=list)
    order_group: dist.ProcessGroup | None = None


def make(config: Config) -> Ranks:
    """Create this process's ranks and groups, and a default group if missing. Collective.

    Raises:
        ValueError: degrees that do not fit the world, replicas without ``ddp``, or ranks with different configurations.
        RuntimeError: no process group and no launcher's environment.
    """
    if not dist.is_initialized():
        backend = "smddp" if config.ddp_dist_backend == "auto" else config.ddp_dist_backend
        make_default_group("smp.init()", backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = agree(vars(config), "smp.init()")
    groups = place(size, config.placement_strategy, config.pipeline_parallel_degree, config.tensor_parallel_degree)
    copies = len(groups["mp"])
    if copies > 1 and not config.ddp:
        raise ValueError(
            f"smp.init(): {size} ranks hold {copies} replicas of the model, and 'ddp' is False: set 'ddp': True to "
            f"average their gradients, or 'partitions': {config.pipeline_parallel_degree * copies} to cut the model, "
            f"or start {size // copies} rank(s). Keys come from the dictionary of init() and from {LAUNCHER}, where a "
            "launcher puts a notebook's 'parameters'"
        )
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
    values: dict[str, Any] = {}
    for name, lists in groups.items():
        # Without tensor parallelism several names mean the same ranks.
        key = tuple(map(tuple, lists))
        if key not in made:
            made[key] = subgroup(lists)
        members = mine(groups, name, rank)
        values[f"{name}_group"] = made[key]
        values[f"{name}_rank"], values[f"{name}_size"] = members.index(rank), len(members)
    local_rank, local_size = _local(hosts, rank)
    mail_group, _ = dist.new_subgroups_by_enumeration(groups["pp"])
    assert isinstance(mail_group, dist.ProcessGroup)  # as the lists cover the world
    object_group = dist.new_group()
    assert object_group is not None  # as this rank is in it
    values |= {"pp_ranks": mine(groups, "pp", rank), "mail_group": mail_group, "object_group": object_group}
    values["tp_ranks"] = mine(groups, "tp", rank)
    if config.tensor_parallel_degree > 1 and config.pipeline_parallel_degree > 1:
        values["order_group"] = dist.new_subgroups_by_enumeration(groups["tp"])[0]
    return Ranks(rank, size, local_rank, local_size, **values)


def _local(hosts: list[str], rank: int) -> tuple[int, int]:
    """(rank on this machine, ranks on it), from the launcher, else from host names."""
    for of_rank, of_size in (
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if of_rank in os.environ and of_size in os.environ:
            return int(os.environ[of_rank]), int(os.environ[of_size])
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here)
