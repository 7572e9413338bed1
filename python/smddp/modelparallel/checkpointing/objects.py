"""Object messages between ranks outside of steps, for any object that pickle supports."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch.distributed as dist

from smddp.modelparallel.state import state


class CommGroup(Enum):
    """The groups of `broadcast`, `allgather` and `barrier`."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    TP_GROUP = "tp"
    PP_GROUP = "pp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """Group in which `send` and `recv_from` count the rank number."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    TP_RANK = "tp"
    PP_RANK = "pp"
    RDP_RANK = "rdp"


def _group(which: CommGroup | RankType, caller: str) -> dist.ProcessGroup:
    if not isinstance(which, (CommGroup, RankType)):
        raise TypeError(f"smp.{caller} takes a CommGroup or RankType, got {type(which).__name__}: {which!r}")
    _, ranks = state.made(caller)
    return ranks.object_group if which.value == "world" else getattr(ranks, f"{which.value}_group")


def _world_rank(number: int, rank_type: RankType, caller: str) -> int:
    members = dist.get_process_group_ranks(_group(rank_type, caller))
    if not 0 <= number < len(members):
        raise ValueError(f"smp.{caller}: {rank_type.name} {number} is not among 0 to {len(members) - 1}")
    return members[number]


def send(obj: Any, dest: int, rank_type: RankType = RankType.WORLD_RANK) -> None:
    """Sends an object to a rank, which calls `recv_from`. Objects to one rank arrive in order.

    Args:
        obj: Object that pickle can serialize.
        dest: Rank of the receiver.
        rank_type: Group in which `dest` counts.
    """
    to = _world_rank(dest, rank_type, "send()")
    _, ranks = state.made("send()")
    dist.send_object_list([obj], dst=to, group=ranks.object_group)


def recv_from(src: int, rank_type: RankType = RankType.WORLD_RANK) -> Any:
    """Receives the next object that a rank sends by `send` or `broadcast`.

    Args:
        src: Rank of the sender.
        rank_type: Group in which `src` counts.
    """
    sender = _world_rank(src, rank_type, "recv_from()")
    _, ranks = state.made("recv_from()")
    found: list[Any] = [None]
    dist.recv_object_list(found, src=sender, group=ranks.object_group)
    return found[0]


def broadcast(obj: Any, group: CommGroup = CommGroup.WORLD) -> None:
    """Sends an object to all other ranks of a group. Only the sender calls it; the others call `recv_from`.

    Args:
        obj: Object that pickle can serialize.
        group: Group of ranks.
    """
    _, ranks = state.made("broadcast()")
    for other in dist.get_process_group_ranks(_group(group, "broadcast()")):
        if other != ranks.rank:
            dist.send_object_list([obj], dst=other, group=ranks.object_group)


def allgather(obj: Any, group: CommGroup = CommGroup.WORLD) -> list[Any]:
    """Returns the objects of all ranks of a group, in order of rank. Collective.

    Args:
        obj: Object that pickle can serialize.
        group: Group of ranks.
    """
    over = _group(group, "allgather()")
    found: list[Any] = [None] * dist.get_world_size(over)
    dist.all_gather_object(found, obj, group=over)
    return found


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Return once all ranks of a group have called this."""
    dist.barrier(group=_group(group, "barrier()"))


def mp_barrier() -> None:
    """`barrier` of the ranks that hold one copy of the model."""
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    """`barrier` of the ranks of a stage."""
    barrier(CommGroup.DP_GROUP)
