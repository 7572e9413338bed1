"""Collectives of a group as autograd functions, for whatever dimension of parallelism needs them.

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
    """(sum of ``send``, ...), the first ``send[0]`` for rank 0 and so on -> (sum of ``receive``, ...) likewise."""
    rows = rows.contiguous()
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, receive, send, group=group)
    return out


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """The tensors of all ranks, of one shape, in order of rank and side by side in ``dim``."""
    tensor = tensor.contiguous()
    parts = tensor.new_empty((group.size(), *tensor.shape))
    dist.all_gather_into_tensor(parts.view(-1), tensor.view(-1), group=group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def scattered(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's part in ``dim``, which the ranks divide, of the sum of all ranks' tensors."""
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
    """As `all_to_all`; gradients go back the same way."""
    return _Exchange.apply(rows, send, receive, group)


def gather(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """As `gathered`; each rank uses the whole, and gets the sum of the ranks' gradients of its part."""
    return _Gather.apply(tensor, group, dim)


def scatter(tensor: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """As `scattered`; gradients of all parts go to every rank."""
    return _Scatter.apply(tensor, group, dim)
