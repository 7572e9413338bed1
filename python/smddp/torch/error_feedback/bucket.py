"""One of DDP's buckets under error feedback: what this rank owes to its sum, and its way to all ranks."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smddp.torch.error_feedback.internode import Crossing


class Bucket:
    """What its steps have in common.

    away: what was rounded away of blocks that went to other nodes, as `Crossing.round` has it; own: of this rank's
    block of the sum, on its way to all ranks. Both None before the first step.
    """

    def __init__(self, bucket: dist.GradBucket, names: list[str], across: Crossing) -> None:
        buffer = bucket.buffer()
        self.names = names
        # DDP lays gradients out as their parameters are, one after the other.
        likes = [torch.empty_like(parameter, device="meta") for parameter in bucket.parameters()]
        starts = accumulate((like.numel() for like in likes), initial=0)
        self._places = [(like.size(), like.stride(), start) for like, start in zip(likes, starts)]
        self.count = buffer.numel()
        self.across = across
        self.block = -(-self.count // across.size)
        self.away: Tensor | None = None
        self.own: Tensor | None = None

    def is_of(self, bucket: dist.GradBucket, names: list[str], across: Crossing | None) -> bool:
        return self.names == names and self.count == bucket.buffer().numel() and self.across is across

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters' parts of the bucket's elements."""
        first, named = flat.storage_offset(), zip(self.names, self._places, strict=True)
        return {name: flat.as_strided(size, stride, first + start) for name, (size, stride, start) in named}

    def owed(self) -> dict[str, Tensor]:
        """By parameter, in its shape."""
        blocks = torch.zeros(self.across.size, self.block)
        if self.away is not None:
            blocks[self.across.far] = self.across.expanded(self.away, self.block)
        if self.own is not None:
            blocks[self.across.rank] = self.own
        return {name: view.clone() for name, view in self.views(blocks.view(-1)).items()}


class OnItsWay:
    """A step of a bucket: a reduce_scatter, after which each rank has its block of the sum, and an all_gather of those.

    arrears: added to this step's gradients, by parameter.
    """

    def __init__(self, bucket: Bucket, buffer: Tensor, arrears: dict[str, Tensor], group: Any) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._bucket, self._buffer, self._group = bucket, buffer, group
        across = bucket.across
        self._blocks = buffer.new_empty(across.size, bucket.block)
        flat = self._blocks.view(-1)
        # As DDP divides without a hook.
        torch.mul(buffer, 1.0 / across.size, out=flat[: bucket.count])
        flat[bucket.count :] = 0
        for name, part in bucket.views(flat).items():
            if name in arrears:
                part += arrears[name]
        if bucket.own is not None:
            self._blocks[across.rank] += bucket.own
            bucket.own = None
        bucket.away = across.round(self._blocks, bucket.away)
        self._sum = buffer.new_empty(bucket.block)
        self._work: Any = dist.reduce_scatter_tensor(self._sum, self._blocks, group=group, async_op=True)

    def gather(self) -> None:
        """Sends what is summed here to all ranks. Raises what went wrong on the way."""
        self._work.wait()
        self._work = dist.all_gather_into_tensor(self._blocks, self._sum, group=self._group, async_op=True)

    def end(self) -> None:
        """The bucket has its average, and DDP is told so. Raises what went wrong on the way."""
        self._work.wait()
        away = self._sum - self._blocks[self._bucket.across.rank]
        # What is not finite came so, and is not owed.
        self._bucket.own = away if away.isfinite().all() else away.nan_to_num_(0.0, 0.0, 0.0)
        self._buffer.copy_(self._blocks.view(-1)[: self._bucket.count])
        self.future.set_result(self._buffer)
