"""Loss scaling: one decision of all ranks to skip a step.

Each rank checks the gradients that it holds. If only some ranks found an overflow, they would skip the step and lower
their scale while the others step. Scales and parameters would differ between ranks from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from smddp.sagemaker.private_names import is_flattened
from smddp.sagemaker.state_handler import state

Found = dict[torch.device, torch.Tensor]


def agreed(original: Callable[..., Found]) -> Callable[..., Found]:
    """``_unscale_grads_`` of a scaler that finds an overflow on every rank if one rank has one.

    One all-reduce over all ranks, for an optimizer that holds parameters of FSDP, tensor or expert parallelism. torch
    agrees over the mesh of the first gradient only, and refuses gradients that are DTensors beside plain ones.
    """

    @functools.wraps(original)
    def _unscale_grads_(
        self: Any, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Found:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(map(_is_shared, parameters)):
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)
        found = original(self, _Local(parameters), inv_scale, found_inf, allow_fp16)
        assert state.mesh is not None  # `init` made it before it installed this function
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        flags = [flag.detach().reshape(()).to(state.mesh.device_type) for flag in found.values()]
        overflow = torch.stack(flags).max() if flags else torch.zeros((), device=state.mesh.device_type)
        verdict = torch.stack([overflow, overflow.new_tensor(float(has_gradients))])
        dist.all_reduce(verdict, dist.ReduceOp.MAX)
        if not found and bool(verdict[1]):
            # This rank holds no gradient, and a scaler without a flag raises.
            found[found_inf.device] = found_inf
        for flag in found.values():
            flag.fill_(verdict[0].to(flag.device))
        return found

    return _unscale_grads_


class _Local:
    """An optimizer as a scaler sees it, whose gradients are this rank's parts of them, in the same memory."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": [_local(parameter) for parameter in parameters]}]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter.grad, DTensor):
        return parameter
    gradient = parameter.grad.to_local()
    holder = gradient.detach()
    holder.grad = gradient
    return holder


def _is_shared(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) or is_flattened(parameter)
