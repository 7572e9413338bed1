"""Differentiable collectives of a process group.

function       forward            backward
exchange       uneven all-to-all  the same, the other way
gather         all-gather         reduce-scatter
scatter        reduce-scatter     all-gather

A backward pass is one of these functions again, so gradients of gradients are right. `all_to_all`, `gathered` and
`scattered` are the same without gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Uneven all-to-all: (sum of ``send``, ...), the first ``send[0]`` rows for rank 0 -> (sum of ``receive``, ...)."""
    rows = rows.contiguous()
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, receive, send, group=group)
    return out


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Concatenates the equally shaped tensors of all ranks along ``dim``, in order of rank."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather_into_tensor(parts.view(-1), tensor.view(-1), group=group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def scattered(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Reduce-scatter: this rank's part of the sum over the ranks, split along ``dim``."""
    size = group.size()
    parts = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(size, dim))
    mine = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    dist.reduce_scatter_tensor(mine.view(-1), parts.view(-1), group=group)
    return mine


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return gathered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter(grad, ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return scattered(tensor, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather(grad, ctx.group, ctx.dim), None, None


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Differentiable `all_to_all`; backward sends gradients to the source ranks."""
    return _Exchange.apply(rows, send, receive, group)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Differentiable `gathered`; backward reduce-scatters the gradients."""
    return _Gather.apply(tensor, group, dim)


def scatter(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """Differentiable `scattered`; backward all-gathers the gradients."""
    return _Scatter.apply(tensor, group, dim)
