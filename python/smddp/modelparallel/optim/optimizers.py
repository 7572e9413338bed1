"""LAMB and NovoGrad, as apex's fused ones compute them, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel import grad_norm
from smddp.modelparallel.data_parallel.sharded_gradients import plain
from smddp.modelparallel.state import state
from smddp.modelparallel.tensor.split import split_of


def _no_amsgrad(amsgrad: bool, name: str) -> None:
    if amsgrad:
        raise ValueError(f"{name} has no AMSGrad variant: amsgrad must be False")


def _lengths(parameter: torch.Tensor, *tensors: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norms of tensors with the shape of a parameter, over all parts. Collective for split ones."""
    found = torch.stack([plain(torch.linalg.vector_norm(tensor, norm_type)) for tensor in tensors])
    if split_of(parameter) is None:
        return found
    assert state.ranks is not None  # as there is a parameter that is shared
    if math.isinf(norm_type):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=state.ranks.tp_group)
        return found
    found = found.square()
    dist.all_reduce(found, group=state.ranks.tp_group)
    return found.sqrt()


class _Fused(torch.optim.Optimizer):
    """Base class: `step` iterates over the groups, and each group counts its steps."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step; ``closure`` recomputes the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._scale()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.float() * scale
                parameter.add_(self._update(group, parameter, gradient).to(parameter.dtype), alpha=-group["lr"])
        return loss

    def _scale(self) -> float | torch.Tensor:
        return 1.0

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def _corrections(group: dict[str, Any]) -> tuple[float, float]:
        if not group["bias_correction"]:
            return 1.0, 1.0
        beta1, beta2 = group["betas"]
        return 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]


class FusedLAMB(_Fused):
    """LAMB: Adam with steps scaled to the norm of each tensor, after clipping by the whole model's norm."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        _no_amsgrad(amsgrad, "FusedLAMB")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
            },
        )
        self._decoupled, self._max_grad_norm, self._always = adam_w_mode, max_grad_norm, use_nvlamb

    def _scale(self) -> torch.Tensor:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = grad_norm.in_step([parameter.grad for parameter in parameters if parameter.grad is not None])
        return torch.where(norm > self._max_grad_norm, self._max_grad_norm / norm, torch.ones_like(norm))

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        held, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        if not held:
            held["exp_avg"], held["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        value = parameter.float()
        if not self._decoupled:
            gradient = gradient + decay * value
        held["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        held["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first, second = self._corrections(group)
        update = (held["exp_avg"] / first) / ((held["exp_avg_sq"] / second).sqrt() + group["eps"])
        if self._decoupled:
            update = update + decay * value
        if decay or self._always:
            lengths = _lengths(parameter, value, update)
            ratio = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], 1.0)
            update = update * ratio
        return update


class FusedNovoGrad(_Fused):
    """NovoGrad: momentum over gradients that are divided by a running norm of each tensor's gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _no_amsgrad(amsgrad, "FusedNovoGrad")
        if norm_type not in (2, math.inf):
            raise ValueError(f"FusedNovoGrad: norm_type={norm_type} must be 2 or inf")
        super().__init__(
            params,
            {
                "lr": lr,
                "bias_correction": bias_correction,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "grad_averaging": grad_averaging,
                "norm_type": norm_type,
                "init_zero": init_zero,
            },
        )
        self._inside = reg_inside_moment

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        held, (beta1, beta2), decay = self.state[parameter], group["betas"], group["weight_decay"]
        (length,) = _lengths(parameter, gradient, norm_type=group["norm_type"])
        if not held:
            held["exp_avg"] = torch.zeros_like(gradient)
            held["norm"] = torch.zeros_like(length) if group["init_zero"] else length.clone()
        if group["norm_type"] == 2:
            held["norm"] = (beta2 * held["norm"] ** 2 + (1 - beta2) * length**2).sqrt()
        else:
            held["norm"] = beta2 * held["norm"] + (1 - beta2) * length
        first, second = self._corrections(group)
        divisor = held["norm"] / math.sqrt(second) + group["eps"]
        share, value = 1 - beta1 if group["grad_averaging"] else 1.0, parameter.float()
        if self._inside:
            held["exp_avg"].mul_(beta1).add_(gradient / divisor + decay * value, alpha=share)
            return held["exp_avg"] / first
        held["exp_avg"].mul_(beta1).add_(gradient, alpha=share)
        return (held["exp_avg"] / first) / divisor + decay * value
