"""The key ``fp16``: a float16 model, float32 masters of its parameters, and the scale of its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel import grad_norm
from smddp.modelparallel.pipeline import microbatching
from smddp.modelparallel.state import state
from smddp.modelparallel.tensor.marks import marked
from smddp.modelparallel.tensor.split import SPLIT

DYNAMIC = {
    "init_scale": 2.0**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class LossScale:
    """Loss scale: constant, or the largest scale with finite gradients.

    A dynamic scale is divided by ``scale_factor`` at the ``delayed_shift``-th step that is not finite, and multiplied
    by it after ``scale_window`` steps that were. ``consecutive_hysteresis``: a finite step starts that count anew.

    Raises ValueError for an unknown option, or a scale that is not positive.
    """

    def __init__(self, static: float | None, dynamic: bool, options: dict[str, Any]) -> None:
        unknown = sorted(options.keys() - DYNAMIC.keys())
        if unknown:
            raise ValueError(f"unknown dynamic_loss_args {', '.join(unknown)}; there are {', '.join(DYNAMIC)}")
        self.options: dict[str, Any] = {**DYNAMIC, **options}
        self.dynamic = dynamic
        self.scale = float(self.options["init_scale"] if dynamic else static or 1.0)
        if not self.scale > 0:
            raise ValueError(f"a loss scale must be positive, got {self.scale}")
        self._left, self._finite = int(self.options["delayed_shift"]), 0

    def update(self, overflow: bool) -> None:
        """Update the scale after a step with nonfinite or finite gradients."""
        if not self.dynamic:
            return
        if overflow:
            self._finite = 0
            self._left -= 1
            if self._left <= 0:
                self._left = 1
                self.scale = max(self.scale / self.options["scale_factor"], self.options["min_scale"])
            return
        self._finite += 1
        if self.options["consecutive_hysteresis"]:
            self._left = int(self.options["delayed_shift"])
        if self._finite % self.options["scale_window"] == 0:
            self._left = int(self.options["delayed_shift"])
            self.scale *= self.options["scale_factor"]

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "left": self._left, "finite": self._finite}

    def load_state_dict(self, values: dict[str, float]) -> None:
        self.scale, self._left, self._finite = values["scale"], int(values["left"]), int(values["finite"])


def halve_marked(module: torch.nn.Module) -> None:
    """Make the parameters of modules under `smp.tensor_parallelism()` float16: the key ``fp16_params``."""
    for each in filter(marked, module.modules()):
        for parameter in each.parameters(recurse=False):
            parameter.data = parameter.data.half()


class Masters:
    """Float32 copies of an optimizer's float16 parameters, which replace them in its groups.

    Attributes:
        taken: True if the masters have the gradients of this step.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masters: set[int] = set()
        self.taken = False

    def is_master(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._masters

    def adopt(self, optimizer: torch.optim.Optimizer, wanted: Callable[[torch.Tensor], bool]) -> None:
        """Replace each ``wanted`` parameter without a master in the groups by a master."""
        for group in optimizer.param_groups:
            group["params"] = [p if self.is_master(p) or not wanted(p) else self._master(p) for p in group["params"]]

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        master = torch.nn.Parameter(parameter.detach().float().clone(), requires_grad=parameter.requires_grad)
        master.__dict__.update({name: mark for name, mark in vars(parameter).items() if name == SPLIT})
        self.pairs.append((parameter, master))
        self._masters.add(id(master))
        return master

    def take(self, scale: float) -> None:
        """Copy the unscaled gradients to the masters."""
        if self.taken:
            return
        for parameter, master in self.pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float().div_(scale)
        self.taken = True

    def gradients(self) -> list[torch.Tensor]:
        return [master.grad for _, master in self.pairs if master.grad is not None]

    def overflow(self) -> bool:
        """Return True if any stage has a nonfinite gradient. Collective over the copy of the model."""
        assert state.ranks is not None  # as there is an optimizer
        found = self.gradients()
        finite = torch.ones((), device=grad_norm.device(found))
        for gradient in found:
            finite = torch.minimum(finite, torch.isfinite(gradient).all().float())
        if state.ranks.mp_size > 1:
            dist.all_reduce(finite, dist.ReduceOp.MIN, group=state.ranks.mp_group)
        if state.optimizer is not None and state.optimizer.shares is not None:
            # Each replica has checked its shard.
            dist.all_reduce(finite, dist.ReduceOp.MIN, group=state.ranks.rdp_group)
        return not bool(finite)

    @torch.no_grad()
    def give(self) -> None:
        """Copy the masters' values to the model."""
        for parameter, master in self.pairs:
            parameter.copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy values that were loaded into the model to the masters."""
        for parameter, master in self.pairs:
            master.copy_(parameter)

    def zero_grad(self) -> None:
        self.taken = False
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None


def inputs(value: Any) -> Any:
    """Convert the inputs of a float16 model: float32 tensors become float16."""
    return _cast(value, torch.float32, torch.float16)


def outputs(value: Any) -> Any:
    """Convert the outputs of a float16 model: float16 tensors become float32."""
    return _cast(value, torch.float16, torch.float32)


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    def change(leaf: Any, _: str) -> Any:
        return leaf.to(after) if isinstance(leaf, torch.Tensor) and leaf.dtype == before else leaf

    return microbatching.each(value, change, "")
