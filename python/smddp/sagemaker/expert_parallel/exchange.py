"""The collectives of a dispatch, as autograd functions. Rows travel; what a row holds does not matter.

function      forward            backward
exchange      uneven all-to-all  the same, the other way
gather_rows   all-gather         reduce-scatter
scatter_rows  reduce-scatter     all-gather
scaled        nothing            multiplies

A backward pass is one of these functions again, so gradients of gradients are right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class ExpertGroup:
    """The ranks among which experts are spread; one rank alone has no group. Copies of a model share it."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.group = None if mesh is None else mesh.get_group()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()

    def __deepcopy__(self, memo: dict) -> ExpertGroup:
        return self

    def __reduce__(self) -> tuple:
        return this_process, ()


def this_process() -> ExpertGroup:
    """The expert group of this process. Raises RuntimeError before `tsm.init()`."""
    from smddp.sagemaker.state_handler import state

    if state.mesh is None:
        raise RuntimeError("a model with spread experts can be made or unpickled only after tsm.init()")
    mesh = state.expert_mesh
    return ExpertGroup(None if mesh is None else mesh["expert"])


def all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: ExpertGroup) -> torch.Tensor:
    """(sum of ``send``, ...), the first ``send[0]`` for rank 0 and so on -> (sum of ``receive``, ...) likewise."""
    rows = rows.contiguous()
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows, receive, send, group=group.group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: ExpertGroup) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _gathered(rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    out = rows.new_empty((group.size * rows.shape[0], *rows.shape[1:]))
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group.group)
    return out


def _scattered(rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    out = rows.new_empty((rows.shape[0] // group.size, *rows.shape[1:]))
    dist.reduce_scatter_tensor(out, rows.contiguous(), group=group.group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return scatter_rows(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
        ctx.group = group
        return _scattered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grad, ctx.group), None


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: ExpertGroup) -> torch.Tensor:
    """As `all_to_all`; gradients go back the same way."""
    return _Exchange.apply(rows, send, receive, group)


def gather_rows(rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    """(n, ...), n equal on all ranks -> (ranks * n, ...), equal on all ranks."""
    return _Gather.apply(rows, group)


def scatter_rows(rows: torch.Tensor, group: ExpertGroup) -> torch.Tensor:
    """(ranks * n, ...) -> this rank's (n, ...) of the sum over the ranks."""
    return _Scatter.apply(rows, group)


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor``, whose gradient is multiplied by ``factor``."""
    return tensor if factor == 1.0 else _Scaled.apply(tensor, factor)
