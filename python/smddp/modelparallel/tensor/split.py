"""Split of a parameter over a tensor group: this rank's part, and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smddp.formats import exact
from smddp.modelparallel.state import state

# Attributes of a parameter: its split over the tensor group, and the parameter that has taken its place.
SPLIT, REPLACED = "_smp_split", "_smp_became"


@dataclass(frozen=True)
class Split:
    """Split of a parameter, and of tensors with its shape, over a tensor group.

    Attributes:
        size, rank: of the tensor group.
        dim: split dimension.
        stored: shape of the whole tensor that the parts are cut from.
        whole: its shape in one process, with the same elements.
    """

    size: int
    rank: int
    dim: int
    stored: tuple[int, ...]
    whole: tuple[int, ...]

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of each part."""
        found = list(self.stored)
        found[self.dim] //= self.size
        return tuple(found)

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor; a part is returned unchanged."""
        if tuple(tensor.shape) != self.whole:
            return tensor
        return tensor.reshape(self.stored).chunk(self.size, self.dim)[self.rank].contiguous()

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Join all parts."""
        return torch.cat(parts, self.dim).reshape(self.whole)

    @exact()
    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of ``part``. Collective over the tensor group.

        A sharded ``part`` is gathered over its shard group first.
        """
        assert state.ranks is not None  # as there is a model
        if isinstance(part, DTensor):
            part = part.full_tensor()
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.detach().contiguous(), group=state.ranks.tp_group)
        return self.joined(parts)


def split_of(parameter: Any) -> Split | None:
    """Return the split of a parameter; None if this rank has all of it."""
    return getattr(parameter, SPLIT, None)


def counts_here(parameter: Any) -> bool:
    """Return True if a sum over the tensor group includes this rank's value: replicated values count once."""
    return state.ranks is None or state.ranks.tp_rank == 0 or split_of(parameter) is not None


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Replace the parameters of an optimizer that was created before the model was wrapped."""
    for group in optimizer.param_groups:
        group["params"] = [_newest(parameter) for parameter in group["params"]]


def _newest(parameter: Any) -> Any:
    while (found := getattr(parameter, REPLACED, None)) is not None:
        parameter = found
    return parameter
