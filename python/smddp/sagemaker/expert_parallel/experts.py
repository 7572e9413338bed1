"""Experts of one rank, which compute tokens of the whole expert group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smddp.sagemaker.expert_parallel.dispatch import Dispatcher
from smddp.sagemaker.expert_parallel.families import Family
from smddp.sagemaker.tensor_parallel.mixins import Mixin
from smddp.sagemaker.tensor_parallel.regions import TensorGroup, copy_to_region, reduce_from_region
from smddp.sagemaker.tensor_parallel.shards import local_parameter


@dataclass(frozen=True)
class Place:
    """Location and dispatcher of a layer's experts.

    Attributes:
        family: of the model.
        names: of the parameters, which FSDP1 turns into plain tensors during the recomputation of a layer.
        dispatcher: sends tokens to experts.
        tp: tensor group that shards the experts' columns; None without.
    """

    family: Family
    names: tuple[str, ...]
    dispatcher: Dispatcher
    tp: TensorGroup | None


class SpreadExperts(Mixin):
    """Mixin of stacked experts; the parameters hold only this rank's experts.

    Gradients of its parameters are sums over the tokens of the expert group, divided by its size: as all others are
    means over data-parallel ranks, so are these once they are averaged over the ranks that hold the same experts.
    """

    _ep: Place

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(..., hidden), the chosen experts (tokens, k) and their weights (tokens, k) -> (..., hidden)."""
        shape, place = tokens.shape, self._ep
        tokens = tokens.reshape(-1, shape[-1])
        if place.tp is not None:
            tokens, weights = copy_to_region(place.tp, tokens, weights)
        arrived = place.dispatcher.send(tokens, chosen, weights)
        result = arrived.back(self._weighted(arrived.rows, arrived.experts, arrived.weights))
        if place.tp is not None:
            result = reduce_from_region(result, place.tp)
        return result if result.shape == shape else result.view(shape)

    def _weighted(self, rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The sum of what each row's experts (-1: none) make of it, by ``weights``."""
        row, slot = (experts >= 0).nonzero(as_tuple=True)
        expert = experts[row, slot]
        order = expert.argsort(stable=True)
        row, slot = row[order], slot[order]
        counts = torch.bincount(expert, minlength=self._ep.dispatcher.here).tolist()
        matrices = self._matrices()
        inputs = rows[row].to(next(iter(matrices[0].values())).dtype)
        # Include experts without tokens: FSDP reduces gradients on all ranks or on none.
        outputs = [self._ep.family.compute(self, *each) for each in zip(matrices, inputs.split(counts))]
        weighted = torch.cat(outputs) * weights[row, slot, None]
        return torch.zeros_like(rows).index_add(0, row, weighted.to(rows.dtype))

    def _matrices(self) -> list[dict[str, torch.Tensor]]:
        """Returns each expert's matrices by name."""
        degree = self._ep.dispatcher.group.size
        whole = {name: scaled(local_parameter(self, name), 1 / degree) for name in self._ep.names}
        # Gate and up of a tensor rank are stored side by side: (experts, 2, columns, in).
        stacks = {name: tensor.flatten(1, 2) if tensor.dim() == 4 else tensor for name, tensor in whole.items()}
        return [dict(zip(stacks, matrices)) for matrices in zip(*(stack.unbind(0) for stack in stacks.values()))]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor``, whose gradient is multiplied by ``factor``."""
    return tensor if factor == 1.0 else _Scaled.apply(tensor, factor)


class StackedExperts(nn.Module):
    """Experts that were a list of modules, as transformers 5 stacks them: (experts, 2 x inner, hidden) for gate and up,
    (experts, hidden, inner) for down."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, act_fn: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = gate_up, down, act_fn

    def __getattr__(self, name: str) -> Any:
        """Attributes of the list's names, "0.w1.weight", exist: torch looks up each name of a full state dict."""
        return _Named() if name.isdigit() else super().__getattr__(name)


class _Named:
    """Placeholder for the names of a list of experts, without values."""

    def __getattr__(self, name: str) -> _Named:
        if name.startswith("_"):
            raise AttributeError(name)
        return self
