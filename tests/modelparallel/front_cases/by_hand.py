"""Model with a manual cut: the interface of `DistributedModel` for the optimizer and checkpoints, without a pipeline.

So they are tested for any cut, including cuts that a pipeline would not choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from smddp.modelparallel import initialize
from smddp.modelparallel.checkpointing import model_state
from smddp.modelparallel.state import state
from torch import nn


@contextlib.contextmanager
def job(**config) -> Iterator:
    """Call `smp.init` with these keys, and reset it afterwards."""
    initialize.init(config)
    try:
        yield state.ranks
    finally:
        state.reset()


class Net(nn.Module):
    """Four layers, with a weight shared by the first and last; one direct buffer, and one in a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.ModuleList([nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)])
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        x = self.first(x)
        for layer in self.middle:
            x = layer(x)
        return self.last(x)


WHERE = {"first": 0, "middle.0": 1, "middle.1": 1, "middle.2": 2, "last": 0}
OTHERWISE = {"first": 1, "middle.0": 0, "middle.1": 0, "middle.2": 0, "last": 1}


class HandCut:
    """Replacement of DistributedModel: `cut` acts as the first step."""

    def __init__(self, module: nn.Module, where: dict[str, int]) -> None:
        self.module, self.partitioned, self.where, self.hooks = module, False, {}, []
        self._wanted = where
        state.model = self

    def get_module(self) -> nn.Module:
        return self.module

    def stage_of_parameter(self, name: str) -> int:
        return self._wanted[name.rpartition(".")[0]]

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.module.named_parameters():
            if not self.partitioned or self.stage_of_parameter(name) == state.ranks.pp_rank:
                yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.local_named_parameters())

    def register_post_partition_hook(self, hook) -> None:
        self.hooks.append(hook)

    def cut(self) -> None:
        self.where, self.partitioned = self._wanted, True
        own = {id(parameter) for parameter in self.local_parameters()}
        others = [parameter for parameter in self.module.parameters() if id(parameter) not in own]
        for parameter in others:
            parameter.data = torch.empty(0)
            parameter.grad = None
            parameter.requires_grad_(False)
        if state.optimizer is not None:
            state.optimizer.lose(others)
        for hook in self.hooks:
            hook(self, state.optimizer)

    def state_dict(self):
        return model_state.whole(self)

    def local_state_dict(self):
        return model_state.local(self)

    def load_state_dict(self, values, strict=True):
        return model_state.load(self, values, strict)


def gradients(module: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Gradients that all ranks and one process agree on, by the first name of each parameter."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=made) for name, p in module.named_parameters()}


def give(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set the gradients of the parameters that are here."""
    for name, parameter in module.named_parameters():
        if parameter.numel():
            parameter.grad = values[name].clone()
