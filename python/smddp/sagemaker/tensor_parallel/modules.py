"""Forward passes of sharded modules. Each class is mixed into a module's own class by `mixins.extend`.

Parameters are DTensors over the tensor mesh, so that FSDP, optimizers and checkpoints know what they are; the
arithmetic runs on their local shards, so that every operation of torch works inside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from smddp.sagemaker import hf
from smddp.sagemaker.tensor_parallel.border import Block
from smddp.sagemaker.tensor_parallel.mixins import Mixin
from smddp.sagemaker.tensor_parallel.product import Product, substituted
from smddp.sagemaker.tensor_parallel.regions import (
    TensorGroup,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_sequence,
    split_to_region,
)
from smddp.sagemaker.tensor_parallel.shards import check_gathered, local_parameter


class _Product(Mixin):
    """``x @ weight + bias`` of a Linear (out, in) or, where ``_tp_transposed``, of transformers' Conv1D (in, out)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    _tp_transposed = False
    _tp_product: Product | None = None  # see layers.py

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._tp_product is not None:
            return self._tp_product(x, weight, bias)
        return F.linear(x, weight.t() if self._tp_transposed else weight, bias)


class Column(_Product):
    """Column-parallel projection: replicated input, output of this rank's columns (or gathered)."""

    _tp_block: Block
    _tp_gather = False

    def _local_weight(self) -> torch.Tensor:
        """Returns the local shard as a matrix: fused projections have an extra dimension for their parts."""
        shard = local_parameter(self, "weight")
        if shard.dim() == 2:
            return shard
        return shard.flatten(1) if self._tp_transposed else shard.flatten(0, 1)

    def _local_bias(self) -> torch.Tensor | None:
        """The local shard as a vector, as `_local_weight`."""
        return None if self.bias is None else local_parameter(self, "bias").reshape(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._local_weight(), self._local_bias()
        y = self._product(self._tp_block.enter(x, self.training), weight, bias)
        if self._tp_gather:
            self._tp_block.leave()
            y = gather_from_region(y, self._tp_block.tp)
        return y


class KeyValueColumn(_Product):
    """A key or value projection with fewer heads than ranks: held whole, each rank computes the heads it needs."""

    _tp_block: Block
    _tp_heads: list[int]
    _tp_head_dim: int

    def _rows(self, name: str) -> torch.Tensor:
        whole = self._tp_block.parameter(self, name)
        heads = whole.view(-1, self._tp_head_dim, *whole.shape[1:])
        if len(self._tp_heads) == 1:
            return heads[self._tp_heads[0]]
        return heads[self._tp_heads].flatten(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        check_gathered(self.weight, self, "weight")
        x = self._tp_block.enter(x, self.training)
        return self._product(x, self._rows("weight"), None if self.bias is None else self._rows("bias"))


class FusedGroupColumn(_Product):
    """q, k, v in one projection, query heads sharded, one key and value head per rank and group of ranks.

    ``weight``/``bias`` hold the query heads; ``key_value_weight`` (kv heads, 2, head_dim, in) and
    ``key_value_bias`` hold all key and value heads. The output is (query heads..., key, value) of this rank.
    """

    _tp_block: Block
    _tp_head: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block, query, bias = self._tp_block, local_parameter(self, "weight"), local_parameter(self, "bias")
        x = block.enter(x, self.training)
        weight = block.parameter(self, "key_value_weight")[self._tp_head].flatten(0, 1)
        return torch.cat([self._product(x, query, bias), self._product(x, weight, self._bias(block))], -1)

    def _bias(self, block: Block) -> torch.Tensor | None:
        if self.bias is None:
            return None
        return block.parameter(self, "key_value_bias")[self._tp_head].flatten()


class Row(_Product):
    """Row-parallel projection: the output is the sum over the ranks, plus the bias."""

    _tp_block: Block
    _tp_outer: Block | None = None
    _tp_split = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self._tp_block
        if self._tp_split:
            x = split_to_region(x, block.tp)
        weight, bias = local_parameter(self, "weight"), local_parameter(self, "bias")
        y = self._product(x, weight, None)
        block.leave()
        if block.open:
            return y
        if block.sequence and not block.tp.keeps_sequence:
            y = scatter_sequence(y, block.tp)
            if bias is not None and self._tp_outer is not None:
                bias = self._tp_outer.parameter(self, "bias")
        else:
            y = reduce_from_region(y, block.tp, owned=True)
        return y if bias is None else y + bias


class Partial(Mixin):
    """A module inside a region with replicated parameters, whose gradients are summed at the border."""

    _tp_block: Block
    _tp_names: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with substituted(self, {name: self._tp_block.parameter(self, name) for name in self._tp_names}):
            return super().forward(*args, **kwargs)


class SharedKey(Mixin):
    """A projection to what stays outside of the region and, in its last columns, to a key for all heads, inside it."""

    _tp_block: Block
    _tp_columns: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        latent, key = y.split([y.shape[-1] - self._tp_columns, self._tp_columns], -1)
        return torch.cat([latent, self._tp_block.enter(key, self.training)], -1)


class Embedding(Mixin):
    """Vocabulary-parallel embedding: ids of other ranks give zeros; the output is the sum over the ranks."""

    weight: torch.Tensor
    _tp_group: TensorGroup
    _tp_first: int
    _tp_rows: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._tp_group.shared_input.check_equal(ids, "the embedding")
        position = ids - self._tp_first
        mine = (position >= 0) & (position < self._tp_rows)
        with substituted(self, {"weight": local_parameter(self, "weight")}):
            found = super().forward(torch.where(mine, position, 0))
        found = found.masked_fill(~mine.unsqueeze(-1), 0)
        return reduce_from_region(found, self._tp_group, owned=True)


class AlibiByHead(Mixin):
    """An attention module that is given linear biases of all heads (Press et al., 2021), which its model has made."""

    _tp_group: TensorGroup
    _tp_heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Some models put them into the mask.
        for name in ("alibi", "position_bias", "attention_mask"):
            if isinstance(kwargs.get(name), torch.Tensor):
                kwargs[name] = self._mine(kwargs[name])
        return super().forward(*args, **kwargs)

    def _mine(self, biases: torch.Tensor) -> torch.Tensor:
        """(batch, heads, ...), or three dimensions with (batch *) heads the first; a mask of all heads alike stays."""
        if biases.dim() == 3:
            return self._mine(biases.unflatten(0, (-1, self._tp_heads))).flatten(0, 1)
        if biases.dim() < 4 or biases.shape[1] == 1 < self._tp_heads:
            return biases
        return biases.chunk(self._tp_group.size, 1)[self._tp_group.rank]


class NormsByHead(Mixin):
    """Layer norms, one for each head: (batch, this rank's heads, sequence, head_dim) -> the same.

    Every rank holds all of them; those of its heads are chosen after the border, so that all have a gradient.
    """

    _tp_block: Block
    _tp_heads: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norms = norms_of(self)
        y = F.layer_norm(x, x.shape[-1:], eps=norms[0].eps)
        y = y * self._chosen(norms, "weight")
        return y if norms[0].bias is None else y + self._chosen(norms, "bias")

    def _chosen(self, norms: list[nn.LayerNorm], name: str) -> torch.Tensor:
        stacked = torch.stack([self._tp_block.parameter(norm, name) for norm in norms])
        return stacked[self._tp_heads].unsqueeze(1)


def norms_of(module: nn.Module) -> list[nn.LayerNorm]:
    """Returns the list of norms that ``module`` holds."""
    return [child for child in module.modules() if isinstance(child, nn.LayerNorm)]


class Experts(Mixin):
    """Experts as stacked parameters: inputs whole, each rank computes its columns of every expert, then the sum."""

    _tp_group: TensorGroup
    _tp_dims: dict[str, tuple[int, int]]
    _tp_biases: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = across(self._tp_group, args, kwargs)
        inside = {name: self._matrices(name) for name in self._tp_dims}
        inside.update((name, self._share(name)) for name in self._tp_biases)
        with substituted(self, inside):
            return reduce_from_region(super().forward(*args, **kwargs), self._tp_group)

    def _matrices(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = local_parameter(self, name)
        dim, parts = self._tp_dims[name]
        return tensor.flatten(dim, dim + 1) if parts > 1 else tensor  # as `Reshaped` stores it

    def _share(self, name: str) -> torch.Tensor:
        """Returns this rank's summand of an output bias. Each rank has the full gradient, which counts once."""
        whole: torch.Tensor = local_parameter(self, name)
        return whole.detach() / self._tp_group.size + (whole - whole.detach())


class IdentityExpert(Mixin):
    """An expert that returns its input; each rank returns a share of it."""

    _tp_group: TensorGroup

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = super().forward(x)
        return same / self._tp_group.size


class RoutedExperts(Mixin):
    """DeepSeek-V3's layer in 4.57, which calls a list of experts one by one: one border for all of them."""

    _tp_group: TensorGroup

    def moe(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(tokens, hidden), and the experts and weights (tokens, k) that the router gives each -> (tokens, hidden)."""
        self._tp_group.shared_input.check_equal(tokens, "the experts")
        tokens, weights = copy_to_region(self._tp_group, tokens, weights)
        total = super().moe(tokens, chosen, weights)  # type: ignore[misc]  # of the class that this is mixed into
        return reduce_from_region(total, self._tp_group)


class ListedExperts(Mixin):
    """Experts as a list of modules, called one by one, with one border for all."""

    experts: nn.ModuleList
    gate: nn.Module
    jitter_noise: float
    top_k: int
    _tp_group: TensorGroup

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, hidden) -> the same, and router logits (tokens, experts)."""
        if self.training and self.jitter_noise > 0:
            low, high = 1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(low, high)
        self._tp_group.shared_input.check_equal(hidden_states, "the experts")
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits, chosen, weights = hf.route(self, tokens)
        tokens, weights = copy_to_region(self._tp_group, tokens, weights)
        total = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            total.index_add_(0, token, self.experts[expert](tokens[token]) * weights[token, slot, None])
        return reduce_from_region(total, self._tp_group).view(hidden_states.shape), logits


# Modules whose forward reads the local tensor of each parameter itself.
READ_LOCAL = (Column, KeyValueColumn, FusedGroupColumn, Row, Partial, Experts)


def across(tp: TensorGroup, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Passes every argument tensor that needs a gradient over one border."""
    flat = [*args, *kwargs.values()]
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor) and value.requires_grad]
    if places:
        tp.shared_input.check_equal(flat[places[0]], "the experts")
        for place, alias in zip(places, copy_to_region(tp, *(flat[i] for i in places))):
            flat[place] = alias
    return tuple(flat[: len(args)]), dict(zip(kwargs, flat[len(args) :]))
