"""Autograd functions at the borders of a tensor-parallel region.

Outside a region every rank of the tensor group holds the same activations; inside, each holds its heads or its
columns. A border is one collective in one direction and none in the other:

    function               forward                     backward
    copy_to_region         nothing                     one all-reduce of all gradients together
    reduce_from_region     all-reduce                  nothing
    gather_from_region     all-gather, last dimension  this rank's part
    split_to_region        this rank's part            all-gather, last dimension

and with sequence parallelism, where activations outside a region are shards of dimension 1:

    gather_sequence        all-gather                  reduce-scatter
    scatter_sequence       reduce-scatter              all-gather
    shard_sequence         this rank's part            all-gather
    gather_whole_sequence  all-gather                  this rank's part

What goes back over a border is taken over its opposite, as an autograd function again, so gradients of gradients
are right, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from smddp.sagemaker.autograd_collectives import gather, gathered, scatter

SEQUENCE = 1


class SharedInput:
    """Callback for tensors that enter regions; `input_check.py` overrides it to compare them between ranks."""

    def check_equal(self, tensor: torch.Tensor, where: str) -> None:
        """Called with each ``tensor`` that enters a region at the module ``where``."""


class TensorGroup:
    """Ranks that share each layer. Copies of a model share this object; unpickling uses the process's group."""

    shared_input = SharedInput()

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.size = mesh.size()
        self._whole_sequence = False

    @property
    def keeps_sequence(self) -> bool:
        """Returns True if this forward pass keeps activations unsharded between blocks under sequence parallelism."""
        # Recomputation in a backward pass belongs to a training pass, even after a later evaluation.
        return self._whole_sequence and not torch.is_grad_enabled()

    @keeps_sequence.setter
    def keeps_sequence(self, value: bool) -> None:
        self._whole_sequence = value

    def __deepcopy__(self, memo: dict) -> TensorGroup:
        return self

    def __reduce__(self) -> tuple:
        return _this_process, ()


def _this_process() -> TensorGroup:
    from smddp.sagemaker.state_handler import state

    if state.mesh is None:
        raise RuntimeError("a transformed model can be unpickled only after tsm.init()")
    return TensorGroup(state.mesh["tensor"])


def _all_reduced(tensor: torch.Tensor, tp: TensorGroup, owned: bool = False) -> torch.Tensor:
    """Returns the sum over the group; in place if ``owned``, which requires that ``tensor`` has no other reader."""
    total = tensor.contiguous()
    if total is tensor and not owned:
        total = tensor.clone()
    dist.all_reduce(total, group=tp.group)
    return total


def _part(tensor: torch.Tensor, tp: TensorGroup, dim: int) -> torch.Tensor:
    return tensor.chunk(tp.size, dim)[tp.rank].contiguous()


def _summed(grads: list[torch.Tensor | None], tp: TensorGroup) -> list[torch.Tensor | None]:
    """Sums each gradient over the group by one all-reduce; keeps None."""
    present = [grad for grad in grads if grad is not None]
    if len(present) <= 1:
        return [None if grad is None else reduce_from_region(grad, tp) for grad in grads]
    dtype = present[0].dtype
    for grad in present:
        dtype = torch.promote_types(dtype, grad.dtype)
    flat = torch.cat([grad.reshape(-1).to(dtype) for grad in present])
    pieces = iter(reduce_from_region(flat, tp, owned=True).split([grad.numel() for grad in present]))
    return [None if grad is None else next(pieces).view(grad.shape).to(grad.dtype) for grad in grads]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.tp = tp
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *_summed(list(grads), ctx.tp)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: TensorGroup, owned: bool) -> torch.Tensor:
        ctx.tp = tp
        total = _all_reduced(tensor, tp, owned)
        if total is tensor:
            ctx.mark_dirty(tensor)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return copy_to_region(ctx.tp, grad)[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: TensorGroup, dim: int) -> torch.Tensor:
        ctx.tp, ctx.dim = tp, dim
        return gathered(tensor, tp.group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Split.apply(grad, ctx.tp, ctx.dim), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, tp: TensorGroup, dim: int) -> torch.Tensor:
        ctx.tp, ctx.dim = tp, dim
        return _part(tensor, tp, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Gather.apply(grad, ctx.tp, ctx.dim), None, None


def copy_to_region(tp: TensorGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors``, equal on all ranks, for use inside a region; their gradients add up in one all-reduce."""
    return _Copy.apply(tp, *tensors)


def reduce_from_region(tensor: torch.Tensor, tp: TensorGroup, owned: bool = False) -> torch.Tensor:
    """The sum of all ranks' ``tensor``, equal on all ranks. ``owned``: it may be overwritten."""
    # Compilers decide about in-place operations, and break graphs at functions that mark them.
    return _Reduce.apply(tensor, tp, owned and not torch.compiler.is_compiling())


def gather_from_region(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """(..., n) on each rank -> (..., n * ranks), equal on all ranks."""
    return _Gather.apply(tensor, tp, -1)


def split_to_region(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """(..., n), equal on all ranks -> this rank's (..., n / ranks)."""
    return _Split.apply(tensor, tp, -1)


def shard_sequence(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """(batch, s, ...), equal on all ranks -> this rank's (batch, s / ranks, ...)."""
    return _Split.apply(tensor, tp, SEQUENCE)


def gather_sequence(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """(batch, s / ranks, ...) -> (batch, s, ...) for use inside a region."""
    return gather(tensor, tp.group, SEQUENCE)


def scatter_sequence(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """The sum of all ranks' (batch, s, ...), as this rank's (batch, s / ranks, ...)."""
    return scatter(tensor, tp.group, SEQUENCE)


def gather_whole_sequence(tensor: torch.Tensor, tp: TensorGroup) -> torch.Tensor:
    """(batch, s / ranks, ...) -> (batch, s, ...), equal on all ranks, for use outside any region."""
    return _Gather.apply(tensor, tp, SEQUENCE)
