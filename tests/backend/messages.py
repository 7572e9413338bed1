"""Point-to-point messages as calls, see `calls`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from backend.calls import Call, Started, of


def _message(group: Any, what: str, count: int, dtype: torch.dtype, tag: int, later: bool) -> Started:
    """A message between ranks 0 and 1 of the group. later: without a wait."""
    rank = group.rank()
    peer = dist.get_global_rank(group, 1 - rank)
    data = of(rank, count, dtype)
    if what == "send":
        made = (dist.isend if later else dist.send)(data, peer, group, tag)
        return made if later else None, [], []
    made = (dist.irecv if later else dist.recv)(data, peer, group, tag)
    return made if later else None, [data], [of(1 - rank, count, dtype)]


def sends(count: int, tag: int = 0, later: bool = False, dtype: torch.dtype = torch.float32) -> Call:
    """A send between ranks 0 and 1 of the group. later: without a wait."""

    def begin(group: Any, _: bool) -> Started:
        return None, *_message(group, "send", count, dtype, tag, later)[1:]

    return Call(("send", count, dtype, f"tag={tag}"), "unwaited" if later else "message", begin)


def receives(count: int, tag: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    """The matching receive of `sends`."""
    return Call(
        ("recv", count, dtype, f"tag={tag}"),
        "message",
        lambda group, _: _message(group, "recv", count, dtype, tag, False),
    )


def both(count: int) -> Call:
    """A send and a recv between ranks 0 and 1, in one batch."""

    def begin(group: Any, later: bool) -> Started:
        peer = dist.get_global_rank(group, 1 - group.rank())
        found, mine = torch.empty(count), of(group.rank(), count, torch.float32)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, found, peer, group)]
        )
        for work in works:
            work.wait()
        return None, [found], [of(1 - group.rank(), count, torch.float32)]

    return Call(("send", count, torch.float32, "tag=0"), "batch", begin)
