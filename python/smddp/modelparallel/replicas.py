"""The mean of gradients over the replicas of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def _buckets(parameters: list[torch.nn.Parameter], limit: int) -> Iterator[list[torch.nn.Parameter]]:
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        if bucket and (size + own > limit or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += own
    if bucket:
        yield bucket


@torch.no_grad()
def average(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int) -> None:
    """Replace each gradient by its mean over ``group``. Collective.

    A parameter that got a gradient on some replicas only counts as zero on the others, as with DDP; one that got none
    anywhere stays without.
    """
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        return
    size = dist.get_world_size(group)
    used = torch.tensor([int(parameter.grad is not None) for parameter in found], device=found[0].device)
    dist.all_reduce(used, group=group)
    used_anywhere = [parameter for parameter, count in zip(found, used.tolist()) if count]
    for bucket in _buckets(used_anywhere, bucket_bytes):
        gradients = [torch.zeros_like(q) if q.grad is None else q.grad for q in bucket]
        flat = _flatten_dense_tensors(gradients)
        dist.all_reduce(flat, group=group)
        flat /= size
        for parameter, mean in zip(bucket, _unflatten_dense_tensors(flat, gradients)):
            if parameter.grad is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)
