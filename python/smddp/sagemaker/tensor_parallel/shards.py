"""From a whole parameter to this rank's shard of it, and the record of what was re-laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from smddp.sagemaker.tensor_parallel.regions import TensorGroup

# Module attribute: {our parameter name: Relayout}; read by state_dict.py.
RELAID = "_tp_relaid"


class Relayout:
    """How one Hugging Face tensor is stored here: as one or several tensors, all views of it.

    Attributes:
        source: the Hugging Face parameter's name in its module.
        stored: our parameters' names in the module.
        split: Hugging Face tensor -> ours, in the order of `stored`.
        join: ours -> the Hugging Face tensor.
    """

    def __init__(
        self,
        source: str,
        stored: tuple[str, ...],
        split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
        join: Callable[..., torch.Tensor],
    ) -> None:
        self.source, self.stored, self.split, self.join = source, stored, split, join

    @property
    def sources(self) -> tuple[str, ...]:
        """Every Hugging Face tensor that the stored ones hold; one, but for lists of experts."""
        return (self.source,)

    def split_all(self, *theirs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`split` of all `sources`."""
        return self.split(*theirs)

    def join_all(self, *ours: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`join` to all `sources`."""
        return (self.join(*ours),)


class Reshaped(Relayout):
    """The same elements in another shape."""

    def __init__(self, name: str, theirs: torch.Size, ours: tuple[int, ...]) -> None:
        self.source, self.stored, self._theirs, self._ours = name, (name,), theirs, ours

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor.reshape(self._ours),)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(self._theirs)


class Grouped(Relayout):
    """A fused projection (groups * (heads + 2) * head_dim, ...) as its query rows and its key and value rows."""

    def __init__(self, name: str, groups: int, heads: int, head_dim: int) -> None:
        self.source, self.stored = name, (name, f"key_value_{name}")
        self._groups, self._heads, self._head_dim = groups, heads, head_dim

    def split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = tensor.shape[1:]
        whole = tensor.reshape(self._groups, self._heads + 2, self._head_dim, *rest)
        query, key_value = whole[:, : self._heads], whole[:, self._heads :]
        return query.reshape(-1, *rest), key_value.contiguous()

    def join(self, query: torch.Tensor, key_value: torch.Tensor) -> torch.Tensor:
        rest = query.shape[1:]
        query = query.reshape(self._groups, self._heads, self._head_dim, *rest)
        return torch.cat([query, key_value], 1).reshape(-1, *rest)


def relayout(module: nn.Module, record: Relayout) -> None:
    """Replace parameter ``record.source`` of ``module`` by the stored ones, and remember how."""
    parameter = module.get_parameter(record.source)
    for name, tensor in zip(record.stored, record.split(parameter.detach())):
        put(module, name, tensor, parameter)
    module.__dict__.setdefault(RELAID, {})[record.source] = record


def shard(module: nn.Module, name: str, dim: int, tp: TensorGroup) -> None:
    """Parameter ``name`` of ``module`` becomes a DTensor sharded in ``dim``; no communication, meta included."""
    parameter = module.get_parameter(name)
    # A copy, so that the whole parameter's memory is free when the last reference to it goes.
    mine = parameter.detach().chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)
    put(module, name, DTensor.from_local(mine, tp.mesh, [Shard(dim)], run_check=False), parameter)


def replicate(module: nn.Module, name: str, tp: TensorGroup) -> None:
    """Parameter ``name`` of ``module`` becomes a DTensor that each rank holds whole, in the same memory."""
    parameter = module.get_parameter(name)
    mine = parameter.detach()
    if mine.storage_offset():  # a view into what was stored otherwise, which a DTensor cannot be copied from
        mine = mine.clone(memory_format=torch.contiguous_format)
    put(module, name, DTensor.from_local(mine, tp.mesh, [Replicate()], run_check=False), parameter)


@overload
def local(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def local(tensor: None) -> None: ...
def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What this rank holds of a parameter, for its arithmetic."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(module: nn.Module, name: str, tensor: torch.Tensor, like: nn.Parameter) -> None:
    """Parameter ``name`` of ``module`` becomes ``tensor``, with the marks of ``like``."""
    new = nn.Parameter(tensor, requires_grad=like.requires_grad)
    for key, value in vars(like).items():  # marks of transformers and of users
        setattr(new, key, value)
    module.register_parameter(name, new)
