"""Queries of `DistributedModel` about tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smddp.modelparallel.state import state
from smddp.modelparallel.tensor.split import split_of

if TYPE_CHECKING:
    Mixin = nn.Module
else:
    Mixin = object


class Answers(Mixin):
    """Mixed into `DistributedModel`.

    All ranks of a tensor group compute with their joint batch, so gradients are equal within the group. Gradients of
    all parameters are averaged over the ranks with the same part (RDP_GROUP).
    """

    @property
    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules that the tensor group shares: those with a part of a parameter."""
        return (m for m in self.modules() if any(split_of(q) is not None for q in m.parameters(recurse=False)))

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Return True if the parameter is split over the tensor group."""
        return split_of(param) is not None

    def is_distributed_buffer(self, buf: torch.Tensor) -> bool:
        """False: buffers are whole on each rank."""
        return False

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Return True if its gradient covers the batch of the whole tensor group: always, with tensor parallelism."""
        return state.ranks is not None and state.ranks.tp_size > 1

    def is_scaled_batch_buffer(self, buf: torch.Tensor) -> bool:
        """Answer as `is_scaled_batch_parameter`."""
        return state.ranks is not None and state.ranks.tp_size > 1

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this stage's parameters whose gradients are averaged over DP_GROUP: all without tensor parallelism."""
        return (each for each in self._named() if not self.is_scaled_batch_parameter(each[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this stage's parameters whose gradients are averaged over RDP_GROUP: all with tensor parallelism."""
        return (each for each in self._named() if self.is_scaled_batch_parameter(each[1]))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        model: Any = self
        return model.local_named_parameters()
