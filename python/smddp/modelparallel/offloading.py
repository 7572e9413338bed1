"""Key ``offload_activations``: saved tensors of checkpointed modules are offloaded to host memory.

The engine is `torch.sagemaker`'s. A microbatch's forward pass on this stage is one of its passes, each call of a
checkpointed module a group of tensors that leaves at once and is loaded ``activation_loading_horizon`` groups ahead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smddp.modelparallel.partitioning.partition import CHECKPOINTED
from smddp.modelparallel.state import state
from smddp.sagemaker.private_names import in_backward


def around(calls: list[Callable[[], Any]], model: nn.Module, horizon: int) -> list[Callable[[], Any]]:
    """Return the calls of a step's microbatches with offloaded forward passes.

    Raises ValueError if a model in training has no checkpointed module.
    """
    if not any(CHECKPOINTED in module.__dict__ for module in model.modules()):
        if model.training and torch.is_grad_enabled():
            raise ValueError(
                "'offload_activations' is True and no module is checkpointed; what it offloads are the inputs of "
                "checkpointed modules: smp.set_activation_checkpointing(module) for the layers, or leave the key out"
            )
        return calls
    return [functools.partial(_forward, call, model, horizon) for call in calls]


def _forward(call: Callable[[], Any], model: nn.Module, horizon: int) -> Any:
    if not torch.is_grad_enabled():
        return call()
    from smddp.sagemaker.offload import engine

    with engine().forward_pass(model, horizon):
        return call()


@contextlib.contextmanager
def layer(module: nn.Module) -> Iterator[None]:
    """One call of a checkpointed module, for the engine."""
    # The recomputation in the backward pass needs its saved tensors at once.
    if state.cfg is None or not state.cfg.offload_activations or in_backward():
        yield
        return
    from smddp.sagemaker.offload import engine

    engine().enter_layer(module)
    try:
        yield
    finally:
        engine().leave_layer()
