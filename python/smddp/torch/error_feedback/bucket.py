"""One DDP bucket under error feedback: its residuals, and one step of its reduction."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smddp.torch.error_feedback.internode import InterNodeReduce


class Bucket:
    """The state of a bucket between steps.

    rounding_error: of the blocks sent to other nodes, as returned by `InterNodeReduce.round`. block_error: of this
    rank's block of the sum in the all_gather. Both None before the first step.
    """

    def __init__(self, bucket: dist.GradBucket, names: list[str], internode: InterNodeReduce) -> None:
        buffer = bucket.buffer()
        self.names = names
        # DDP stores gradients consecutively, each with the strides of its parameter.
        likes = [torch.empty_like(parameter, device="meta") for parameter in bucket.parameters()]
        starts = accumulate((like.numel() for like in likes), initial=0)
        self._places = [(like.size(), like.stride(), start) for like, start in zip(likes, starts)]
        self.count = buffer.numel()
        self.internode = internode
        self.block = -(-self.count // internode.size)
        self.rounding_error: Tensor | None = None
        self.block_error: Tensor | None = None

    def is_of(self, bucket: dist.GradBucket, names: list[str], internode: InterNodeReduce | None) -> bool:
        return self.names == names and self.count == bucket.buffer().numel() and self.internode is internode

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns the parameters' parts of the bucket's elements."""
        first, named = flat.storage_offset(), zip(self.names, self._places, strict=True)
        return {name: flat.as_strided(size, stride, first + start) for name, (size, stride, start) in named}

    def residual(self) -> dict[str, Tensor]:
        """Returns the residual of each parameter, in its shape."""
        blocks = torch.zeros(self.internode.size, self.block)
        if self.rounding_error is not None:
            blocks[self.internode.remote] = self.internode.expanded(self.rounding_error, self.block)
        if self.block_error is not None:
            blocks[self.internode.rank] = self.block_error
        return {name: view.clone() for name, view in self.views(blocks.view(-1)).items()}


class PendingBucket:
    """One step of a bucket: a reduce_scatter of the gradients, then an all_gather of the summed blocks.

    residual: by parameter, added to this step's gradients.
    """

    def __init__(self, bucket: Bucket, buffer: Tensor, residual: dict[str, Tensor], group: Any) -> None:
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._bucket, self._buffer, self._group = bucket, buffer, group
        internode = bucket.internode
        self._blocks = buffer.new_empty(internode.size, bucket.block)
        flat = self._blocks.view(-1)
        # The same division as in DDP without a hook.
        torch.mul(buffer, 1.0 / internode.size, out=flat[: bucket.count])
        flat[bucket.count :] = 0
        for name, part in bucket.views(flat).items():
            if name in residual:
                part += residual[name]
        if bucket.block_error is not None:
            self._blocks[internode.rank] += bucket.block_error
            bucket.block_error = None
        bucket.rounding_error = internode.round(self._blocks, bucket.rounding_error)
        self._sum = buffer.new_empty(bucket.block)
        self._work: Any = dist.reduce_scatter_tensor(self._sum, self._blocks, group=group, async_op=True)

    def gather(self) -> None:
        """Starts the all_gather of the sums. Raises the error of the reduce_scatter."""
        self._work.wait()
        self._work = dist.all_gather_into_tensor(self._blocks, self._sum, group=self._group, async_op=True)

    def end(self) -> None:
        """Stores the average in the bucket and completes the future. Raises the error of the all_gather."""
        self._work.wait()
        error = self._sum - self._blocks[self._bucket.internode.rank]
        # Values that are not finite have no rounding error.
        self._bucket.block_error = error if error.isfinite().all() else error.nan_to_num_(0.0, 0.0, 0.0)
        self._buffer.copy_(self._blocks.view(-1)[: self._bucket.count])
        self.future.set_result(self._buffer)
