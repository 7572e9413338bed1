"""Sharding of parameters, and records of changed storage layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from smddp.sagemaker.tensor_parallel.regions import TensorGroup

# Module attribute: {stored parameter name: Relayout}; read by state_dict.py.
RELAID = "_tp_relaid"
# Module attribute: the module's name in the transformed model, for messages.
NAME = "_tp_name"
# Mesh dimensions over which `transform` shares parameters; FSDP adds others and removes them when it gathers.
_OURS = ("tensor", "expert")


class Relayout:
    """Storage layout of one Hugging Face tensor: one or several tensors, all views of it.

    Attributes:
        source: the Hugging Face parameter's name in its module.
        stored: names of the stored parameters in the module.
        split: Hugging Face tensor -> stored tensors, in the order of `stored`.
        join: stored tensors -> the Hugging Face tensor.
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
        """All Hugging Face tensors in the stored tensors; one, except for lists of experts."""
        return (self.source,)

    def split_all(self, *theirs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`split` of all `sources`."""
        return self.split(*theirs)

    def join_all(self, *ours: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`join` to all `sources`."""
        return (self.join(*ours),)


class Reshaped(Relayout):
    """Relayout that changes only the shape."""

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
    # Copy, so that the full parameter's memory can be freed.
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
    """Returns this rank's local tensor of a parameter, for computation."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """Return this rank's part of parameter ``name`` of ``module``, for computation.

    Raises RuntimeError if FSDP has not gathered the parameter.
    """
    tensor = getattr(module, name)
    check_gathered(tensor, module, name)
    return local(tensor)


def check_gathered(tensor: torch.Tensor, module: nn.Module, name: str) -> None:
    """Raise RuntimeError if FSDP shards ``tensor``, which is parameter ``name`` of ``module``, at the moment."""
    if torch.compiler.is_compiling() or is_gathered(tensor, module):
        return
    path = module.__dict__.get(NAME) or type(module).__name__
    rank = dist.get_rank() if dist.is_initialized() else 0
    raise RuntimeError(
        f"rank {rank}: parameter {name!r} of {path} is sharded by FSDP and not gathered, because {path} runs outside "
        f"of the forward pass of the FSDP unit that holds it. Call the wrapped model, or a unit that holds {path}; or "
        f"make {path} a separate unit by fully_shard() before the modules around it; or, with FSDP2, call unshard() "
        "on the unit first. A method that calls parts of the model, as generate() does, takes "
        "torch.distributed.fsdp.register_fsdp_forward_method(model, 'generate')"
    )


def is_gathered(tensor: torch.Tensor, module: nn.Module) -> bool:
    """Return whether this rank has all values of ``tensor``, a parameter of ``module``, that FSDP shards elsewhere."""
    if not isinstance(tensor, DTensor):
        # FSDP1 with use_orig_params=True leaves slices of its flat parameter as parameters, and computes with plain
        # tensors.
        original = module.__dict__.get("_fsdp_use_orig_params", False) and NAME in module.__dict__
        return not (original and isinstance(tensor, nn.Parameter))
    placements = tensor.placements
    if len(placements) == 1:
        return True
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or (*[""] * (len(placements) - 1), _OURS[0])
    cuts = zip(names, placements, mesh.shape)
    return not any(dim not in _OURS and size > 1 and not cut.is_replicate() for dim, cut, size in cuts)


def put(module: nn.Module, name: str, tensor: torch.Tensor, like: nn.Parameter) -> None:
    """Set parameter ``name`` of ``module`` to ``tensor``, with the attributes of ``like``."""
    new = nn.Parameter(tensor, requires_grad=like.requires_grad)
    for key, value in vars(like).items():  # marks of transformers and of users
        setattr(new, key, value)
    module.register_parameter(name, new)
