"""The styles a plan may name, as torch `ParallelStyle`s for `parallelize_module`.

    style                          applies to            parameter           output
    colwise                        Linear, Conv1D        out columns         this rank's columns
    colwise_gather_output          "                     "                   all columns, gathered
    packed_colwise                 [gate | up] in one    columns of each     this rank's columns of each
    packed_qkv_colwise             [q | k | v] in one    heads of each       this rank's heads of each
    interleaved_qkv_colwise        [q | k | v] of each   heads               this rank's heads
                                   head, one by one
    grouped_qkv_colwise            Falcon's fused qkv    query heads         this rank's query, key and value heads
    rowwise                        Linear, Conv1D        in columns          the sum over the ranks
    rowwise_split_input            "                     "; input is whole   the sum over the ranks
    packed_rowwise                 [gate | up] of        columns of each     this rank's columns of each
                                   experts, (in, out)
    embedding_rowwise              Embedding             vocabulary          the sum over the ranks
    replicated_with_grad_allreduce any, in a region      whole               the module's own
    mla_kv_a_proj                  latent attention's    whole               the module's own, its last columns, a key
                                   first, of keys                            for all heads, inside the region
    moe_tp_experts                 stacked experts, or   by their own entry  the sum over the ranks
                                   a list of them
    bias_of_sum                    their last bias       whole               each rank adds its share of it
    moe_identity_expert            experts that return   none                this rank's share of it
                                   their input
    local_params                   attention             its own, by head    the module's own, of this rank's heads
    bias_by_head                   Embedding             columns, the heads  this rank's columns
    alibi_by_head                  attention             none; of the biases that come for all heads, this rank's
    norms_by_head                  a norm for each head  whole               of this rank's heads
    tied                           a parameter           that of the shared module that has the same
    replicate                      any                   whole               the module's own

The names are those of transformers 5; those of 4.57 are translated in `hf.py`.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from smddp.sagemaker.tensor_parallel import modules
from smddp.sagemaker.tensor_parallel.border import Block
from smddp.sagemaker.tensor_parallel.mixins import extend
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.replicated import read_plain
from smddp.sagemaker.tensor_parallel.shards import Grouped, Reshaped, relayout, shard


class Style(ParallelStyle):
    """Style of one module. ``block``: the border that it shares with adjacent modules."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.tp: TensorGroup = block.tp

    @abc.abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module: ...

    def _become(self, module: nn.Module, mixin: type, **attributes: object) -> nn.Module:
        extend(module, mixin)
        for name, value in attributes.items():
            setattr(module, f"_tp_{name}", value)
        return module


class Shared(NamedTuple):
    """Sharding record of a module.

    Attributes:
        name: of the module in the model.
        style: the applied style.
    """

    name: str
    style: Style


# Module attribute: `Shared`.
_SHARED = "_tp_shared"


def remember(module: nn.Module, name: str, style: Style) -> None:
    """Record that ``module``, named ``name``, is sharded by ``style``."""
    module.__dict__[_SHARED] = Shared(name, style)


def shared(module: nn.Module) -> Shared | None:
    """Returns the record that `remember` stored for ``module``."""
    return module.__dict__.get(_SHARED)


def transposed(module: nn.Module) -> bool:
    """Returns True if ``module`` stores its weight as (in, out), like transformers' Conv1D, not as (out, in)."""
    return not isinstance(module, nn.Linear)


class Colwise(Style):
    """Shards output columns, which consist of ``parts`` equal parts; shards each part separately."""

    def __init__(self, block: Block, gather: bool = False, parts: int = 1) -> None:
        super().__init__(block)
        self.gather, self.parts = gather, parts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        out = 1 if transposed(module) else 0
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if parameter is None:
                continue
            dim = out if name == "weight" else 0
            if self.parts > 1:
                shape = list(parameter.shape)
                shape[dim : dim + 1] = [self.parts, shape[dim] // self.parts]
                relayout(module, Reshaped(name, parameter.shape, tuple(shape)))
                dim += 1
            shard(module, name, dim, self.tp)
        return self._become(module, modules.Column, block=self.block, gather=self.gather, transposed=transposed(module))


class KeyValue(Style):
    """A key or value projection held whole; this rank computes ``heads`` of it (indices, head_dim rows each)."""

    def __init__(self, block: Block, heads: list[int], head_dim: int) -> None:
        super().__init__(block)
        self.heads, self.head_dim = heads, head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.block.partial += [(module, name) for name, _ in module.named_parameters(recurse=False)]
        return self._become(module, modules.KeyValueColumn, block=self.block, heads=self.heads, head_dim=self.head_dim)


class GroupedQKV(Style):
    """Falcon's fused projection with fewer key and value ``groups`` than ranks: query rows shared, the rest whole."""

    def __init__(self, block: Block, groups: int, heads: int, head_dim: int) -> None:
        super().__init__(block)
        self.groups, self.heads, self.head_dim = groups, heads, head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in ("weight", "bias"):
            if getattr(module, name, None) is None:
                continue
            relayout(module, Grouped(name, self.groups, self.heads, self.head_dim))
            shard(module, name, 0, self.tp)
            self.block.partial.append((module, f"key_value_{name}"))
        head = self.tp.rank * self.groups // self.tp.size
        return self._become(module, modules.FusedGroupColumn, block=self.block, head=head)


class Rowwise(Style):
    """Shards input columns; ``split``: the input is replicated."""

    def __init__(self, block: Block, split: bool = False) -> None:
        super().__init__(block)
        self.split = split

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard(module, "weight", 0 if transposed(module) else 1, self.tp)
        return self._become(module, modules.Row, block=self.block, split=self.split, transposed=transposed(module))


class VocabularyEmbedding(Style):
    """Shards the rows of an embedding."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)  # the planner takes no other
        rows = module.weight.shape[0] // self.tp.size
        first = rows * self.tp.rank
        shard(module, "weight", 0, self.tp)
        if module.padding_idx is not None:
            inside = module.padding_idx - first
            module.padding_idx = inside if 0 <= inside < rows else None
        return self._become(module, modules.Embedding, group=self.tp, first=first, rows=rows)


class InRegion(Style):
    """A replicated module inside a region."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = tuple(name for name, _ in module.named_parameters(recurse=False))
        self.block.partial += [(module, name) for name in names]
        return self._become(module, modules.Partial, block=self.block, names=names)


class SharedKey(Style):
    """Latent attention's first projection of keys: the last ``columns`` are a key that every rank's heads use."""

    def __init__(self, block: Block, columns: int) -> None:
        super().__init__(block)
        self.columns = columns

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._become(module, modules.SharedKey, block=self.block, columns=self.columns)


class BiasByHead(Style):
    """An embedding of position biases for each head: shards by head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        shard(module, "weight", 1, self.tp)
        read_plain(module, ("weight",))
        return module


class AlibiByHead(Style):
    """An attention module that is given biases for all ``heads``."""

    def __init__(self, block: Block, heads: int) -> None:
        super().__init__(block)
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._become(module, modules.AlibiByHead, group=self.tp, heads=self.heads)


class NormsByHead(Style):
    """A list of norms, one for each head, of which this rank uses those of ``heads``."""

    def __init__(self, block: Block, heads: list[int]) -> None:
        super().__init__(block)
        self.heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for norm in modules.norms_of(module):
            self.block.partial += [(norm, name) for name, _ in norm.named_parameters(recurse=False)]
        return self._become(module, modules.NormsByHead, block=self.block, heads=self.heads)


class LocalParams(Style):
    """Shards an attention module's direct parameters ``names``, which have an element for each head, by head."""

    def __init__(self, block: Block, names: tuple[str, ...]) -> None:
        super().__init__(block)
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names:
            shard(module, name, 0, self.tp)
        read_plain(module, self.names)
        return module


class StackedExperts(Style):
    """Experts in stacked parameters.

    ``dims``: {parameter: (dimension, parts side by side in it)}; ``biases``: parameters that the sum is given once.
    """

    def __init__(self, block: Block, dims: dict[str, tuple[int, int]], biases: tuple[str, ...]) -> None:
        super().__init__(block)
        self.dims, self.biases = dims, biases

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, (dim, parts) in self.dims.items():
            shape: torch.Size = getattr(module, name).shape
            if parts > 1:
                ours = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
                relayout(module, Reshaped(name, shape, ours))
            shard(module, name, dim + (parts > 1), self.tp)
        return self._become(module, modules.Experts, group=self.tp, dims=self.dims, biases=self.biases)


class IdentityExpert(Style):
    """An expert among stacked experts that returns its input."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._become(module, modules.IdentityExpert, group=self.tp)


class RoutedExperts(Style):
    """A layer that calls its list of experts through a custom method; the experts' projections have separate styles."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._become(module, modules.RoutedExperts, group=self.tp)


class ListedExperts(Style):
    """A block with a list of experts; the experts' projections have separate styles."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._become(module, modules.ListedExperts, group=self.tp)


class Whole(Style):
    """Shards nothing."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module
