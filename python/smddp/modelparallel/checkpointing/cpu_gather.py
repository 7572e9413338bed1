"""`model.cpu()`: the whole model on the CPU of every rank, in place of the part that the rank held."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.modelparallel.checkpointing import model_state
from smddp.modelparallel.ranks import Ranks


def moves_to_cpu(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """True if ``model.to(*args, **kwargs)`` moves parameters of this rank from another device to the CPU."""
    target = kwargs.get("device", kwargs.get("tensor", args[0] if args else None))
    if isinstance(target, torch.Tensor):
        target = target.device
    if isinstance(target, str):
        target = torch.device(target)
    to_cpu = isinstance(target, torch.device) and target.type == "cpu"
    return to_cpu and any(q.device.type != "cpu" for q in model.parameters())


def gather(model: Any, ranks: Ranks) -> None:
    """Gives every rank all parameters and buffers of ``model``. Collective over all ranks of one copy.

    The layers still belong to their stages and tensor groups, so calls of them raise RuntimeError from then on.
    """
    module: nn.Module = model.get_module()
    values = model_state.whole(model)
    trained = {name: q.requires_grad for name, q in model.local_named_parameters(remove_duplicate=False)}
    of_all: list[Any] = [None] * ranks.pp_size
    dist.all_gather_object(of_all, trained, group=ranks.pp_group)
    for other in of_all:
        trained.update(other)
    made: dict[int, nn.Parameter] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _whole(parameter, values[start + key], trained[start + key])
            owner._parameters[key] = made[id(parameter)]
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                buffer.data = values.get(start + key, buffer).to("cpu", copy=True)
    for each in module.modules():
        if each._parameters:
            each.register_forward_pre_hook(_refuse, prepend=True)


def _whole(parameter: nn.Parameter, value: torch.Tensor, trained: bool) -> nn.Parameter:
    """``parameter`` with all its elements: the same object, as optimizers hold it, unless it was a DTensor."""
    value = value.detach().to("cpu", copy=True)
    if isinstance(parameter, DTensor):
        return nn.Parameter(value, requires_grad=trained)
    if parameter.grad is not None and parameter.shape != value.shape:
        parameter.grad = None
    parameter.data = value
    parameter.requires_grad_(trained)
    return parameter


def _refuse(module: nn.Module, _: Any) -> None:
    raise RuntimeError(
        f"{type(module).__name__} is called after model.cpu(), which gathers the parameters of all ranks for saving. "
        "To compute with them, load model.state_dict() into a new model"
    )
