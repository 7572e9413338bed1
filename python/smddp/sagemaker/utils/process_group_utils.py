"""Members of a process group."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["get_global_ranks"]


def get_global_ranks(pg: dist.ProcessGroup | None = None) -> list[int]:
    """The global ranks of ``pg``, in the order of their ranks in it; of the whole world for None.

    Raises TypeError if ``pg`` is not a process group, ValueError on a rank outside it or without any process group.
    """
    if not dist.is_initialized():
        raise ValueError("get_global_ranks() needs the process group: call dist.init_process_group() first")
    if pg is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in this process group: ask on a rank that is")
    if pg is not None and not isinstance(pg, dist.ProcessGroup):
        raise TypeError(f"get_global_ranks() takes a process group, not {type(pg).__name__} {pg!r}")
    return list(dist.get_process_group_ranks(dist.group.WORLD if pg is None else pg))
