"""Stacking of expert lists, with records that restore Hugging Face's names in state dicts."""

from __future__ import annotations

import torch
from torch import nn

from smddp.sagemaker.expert_parallel.experts import StackedExperts
from smddp.sagemaker.tensor_parallel.shards import RELAID, Relayout


class Listed(Relayout):
    """One matrix of each expert of a list, as one stacked parameter.

    Attributes:
        sources: the matrices' names in the list: the concatenated matrices of expert 0, then of expert 1 and so on.
    """

    def __init__(self, stored: str, names: tuple[str, ...], experts: int, shape: tuple[int, ...]) -> None:
        self.source, self.stored = stored, (stored,)
        self._names, self._experts, self._shape = names, experts, shape

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(f"{expert}.{name}.weight" for expert in range(self._experts) for name in self._names)

    def split_all(self, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = len(self._names)
        rows = [torch.cat(matrices[i : i + side]) for i in range(0, len(matrices), side)]
        return (torch.stack(rows).reshape(self._shape),)

    def join_all(self, *stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (stack,) = stored
        matrices = stack.reshape(self._experts, -1, stack.shape[-1]).unbind(0)
        return tuple(part for matrix in matrices for part in matrix.chunk(len(self._names)))


def stacked(experts: nn.ModuleList, names: tuple[str, str, str], parts: bool) -> StackedExperts:
    """Stacks a list of experts into one module; ``parts`` adds a dimension for gate and up, see `spread`."""
    gate, up, down = names

    def together(*which: str) -> torch.Tensor:
        rows = [torch.cat([e.get_submodule(name).get_parameter("weight").detach() for name in which]) for e in experts]
        return torch.stack(rows)

    first = experts[0].get_submodule(gate).get_parameter("weight")
    both, last = together(gate, up), together(down)
    if parts:
        both = both.unflatten(1, (2, -1))
    made = StackedExperts(
        nn.Parameter(both, requires_grad=first.requires_grad),
        nn.Parameter(last, requires_grad=first.requires_grad),
        experts[0].act_fn,
    )
    records = (
        Listed("gate_up_proj", (gate, up), len(experts), tuple(both.shape)),
        Listed("down_proj", (down,), len(experts), tuple(last.shape)),
    )
    made.__dict__[RELAID] = {record.source: record for record in records}
    made.train(experts.training)
    return made
