"""`smp.DistributedOptimizer`: the script's optimizer over this stage's parameters. Its states: `optimizer_dicts`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch

from smddp.modelparallel.data_parallel import grad_norm, sharded_views
from smddp.modelparallel.data_parallel.optimizer_shards import Shares
from smddp.modelparallel.optim import script_optimizer
from smddp.modelparallel.optim.half_precision import LossScale, Masters
from smddp.modelparallel.optim.optimizer_dicts import OptimizerDicts
from smddp.modelparallel.optim.sharded_half_precision import Unscaled
from smddp.modelparallel.state import state as smp
from smddp.modelparallel.tensor.split import follow

log = logging.getLogger("smddp.modelparallel")


class DistributedOptimizer(OptimizerDicts):
    """Wrapper of an optimizer that drops the parameters of other stages at the cut.

    Parameters keep the numbers of one process. So a whole state equals that of one process, and a state saved under one
    cut loads under another. A state that is loaded before the cut is applied at the cut.

    Args:
        optimizer: over the whole model's parameters. An object that holds a torch optimizer as its attribute
            ``optimizer`` is returned itself, with the methods of state dicts overridden; see `script_optimizer`.
        static_loss_scale: factor of the loss under the key ``fp16``. Without it loss scales have no effect.
        dynamic_loss_scale: use the largest scale with finite gradients; a step with nonfinite gradients is skipped.
        dynamic_loss_args: see `LossScale`; the original's keyword arguments are accepted.
    """

    # accelerate would wrap it once more, and its wrapper takes state dicts apart.
    _is_accelerate_prepared = True
    # `GradScaler` unscales for it.
    _step_supports_amp_scaling = False

    def __new__(cls, optimizer: Any, *args: Any, **options: Any) -> Any:
        inner = script_optimizer.torch_optimizer(optimizer)
        if inner is optimizer:
            return super().__new__(cls)
        return script_optimizer.override(optimizer, cls(inner, *args, **options))

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        **loss_args: Any,
    ) -> None:
        # Not torch's: groups, state and hooks are the wrapped optimizer's.
        cfg, ranks = smp.made("DistributedOptimizer()")
        if isinstance(optimizer, DistributedOptimizer):
            raise TypeError("smp.DistributedOptimizer() takes a torch.optim.Optimizer, got DistributedOptimizer")
        options = {**(dynamic_loss_args or {}), **loss_args}
        # Options are checked in each precision.
        scale = LossScale(static_loss_scale, dynamic_loss_scale, options)
        self._scale: LossScale | None = scale if cfg.fp16 else None
        if not cfg.fp16 and (dynamic_loss_scale or static_loss_scale not in (None, 1.0)):
            log.info("smp.DistributedOptimizer(): loss scales have no effect without the key 'fp16': True")
        self.masters: Masters | None = None
        self._overflow = False
        self.optimizer = optimizer
        self.script: Any = self
        # Maximum norm of a sharded model's gradients in each step; 0: no clipping.
        self._clip_to = cfg.sdp_gradient_clipping
        self.shares = Shares(ranks) if cfg.shard_optimizer_state and ranks.rdp_size > 1 else None
        self._stages, self._tensor_ranks = ranks.pp_size, ranks.tp_size
        follow(optimizer)
        self._waiting: dict[str, Any] | None = None
        self._cut = False
        self._all: list[list[int]] = []
        self._held: list[list[int]] = []
        self._noted, self._names = {}, {}
        self._number()
        self._global_grad_norm: torch.Tensor | None = None
        smp.optimizer = self
        if smp.model is not None and smp.model.partitioned:
            if self._shared is not None:
                self._shared.replace(optimizer)
            self._lose_others()

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:
            raise AttributeError(name)
        if name in sharded_views.OF_OPTIMIZER and self._shared is not None:
            return sharded_views.of_optimizer(name, self.param_groups, self._shared.mesh)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer of stage {smp.ranks.pp_rank if smp.ranks else '?'}: {self.optimizer!r}"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @state.setter
    def state(self, values: Any) -> None:
        self.optimizer.state = values

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, values: dict[str, Any]) -> None:
        self.optimizer.defaults = values

    # ---- which parameters ----

    def _number(self) -> None:
        """Number the parameters of new groups, as torch counts them in a state dict."""
        for group in self.optimizer.param_groups[len(self._all) :]:
            first = sum(map(len, self._all))
            numbers = list(range(first, first + len(group["params"])))
            self._all.append(numbers)
            self._held.append(list(numbers))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; after the cut it keeps only this stage's parameters."""
        self.optimizer.add_param_group(param_group)
        self._number()
        if self._cut:
            self._lose_others()

    def _lose_others(self) -> None:
        own = {id(parameter) for parameter in smp.model.local_parameters()}
        whole = {id(parameter) for parameter in smp.model.get_module().parameters()}
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        self.lose(parameter for parameter in everything if id(parameter) in whole - own)

    def lose(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drop ``parameters`` of other stages at the cut, and load a state that was loaded before."""
        lost = {id(parameter): parameter for parameter in parameters}
        self._remove(lost)
        self._cut = True
        script_optimizer.check_parameters(self)
        self._noted, self._names = self._splits(), self.names()
        if self.shares is not None:
            masters = self.masters.is_master if self.masters is not None else (lambda parameter: False)
            self.shares.divide(q for group in self.param_groups for q in group["params"] if not masters(q))
            if self.script is not self:
                others = (q for group in self.param_groups for q in group["params"] if not self.shares.mine(q))
                self._remove({id(q): q for q in others})
        if self._scale is not None:
            self.masters = self.masters or (Masters() if self._shared is None else Unscaled())
            self.masters.adopt(self.optimizer, self._steps)
        self._load_what_waits()

    def _remove(self, lost: dict[int, torch.Tensor]) -> None:
        for group, numbers in zip(self.param_groups, self._held):
            kept = [(n, parameter) for n, parameter in zip(numbers, group["params"]) if id(parameter) not in lost]
            # In place: schedulers and scripts may hold the group.
            group["params"] = [parameter for _, parameter in kept]
            numbers[:] = [number for number, _ in kept]
        for parameter in lost.values():
            self.optimizer.state.pop(parameter, None)

    # ---- steps ----

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """Step the wrapped optimizer over this stage's parameters."""
        self._load_what_waits()
        if self.masters is None or self._scale is None:
            self._clip_shared()
            if self.shares is not None:
                return self._step_share(closure)
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None:
            raise ValueError("step(closure) is not supported under 'fp16': the loss is scaled in the previous step")
        self.masters.take(self._scale.scale)
        self._overflow = self.masters.overflow()
        if not self._overflow:
            self._clip_shared()
            if self.shares is None:
                self.optimizer.step()
                self.masters.give()
            else:
                self._step_share(None)
        self._scale.update(self._overflow)
        self.masters.taken = False
        return None

    def _step_share(self, closure: Any) -> None:
        """Step this replica's shard of the parameters, and receive those of the others."""
        if closure is not None:
            raise ValueError("step(closure) is not supported under 'shard_optimizer_state'")
        assert self.shares is not None  # checked by `step`
        with self.shares.alone(self.param_groups, self._steps):
            self.optimizer.step()
        if self.masters is not None:
            self.masters.give()
        self.shares.spread()

    def _clip_shared(self) -> None:
        """Under sharded data parallelism every step clips."""
        if self._shared is not None and self._clip_to:
            everything = [parameter for group in self.param_groups for parameter in group["params"]]
            self._global_grad_norm = grad_norm.clip(everything, self._clip_to)

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clear this stage's gradients as the wrapped optimizer; also accepts apex's ``set_grads_to_None``."""
        if "set_grads_to_None" in options and "set_grads_to_None" not in signature(self.optimizer.zero_grad).parameters:
            options["set_to_none"] = options.pop("set_grads_to_None")
        self.optimizer.zero_grad(*args, **options)
        if self.masters is not None:
            self.masters.zero_grad()

    @property
    def loss_scale(self) -> float:
        """Factor that `model.backward` applies to the loss: 1 without ``fp16``."""
        return 1.0 if self._scale is None else self._scale.scale

    @property
    def overflow(self) -> bool:
        """True if any stage had nonfinite gradients in the last step; False without ``fp16``."""
        return self._overflow

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step did not change the parameters; see `overflow`."""
        return self._overflow

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients, without the scale, by the whole model's norm, which it returns. Collective."""
        if self.masters is not None:
            self.masters.take(self.loss_scale)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        spread = self.shares is not None and self.masters is not None
        if spread:
            parameters = [parameter for parameter in parameters if self._steps(parameter)]
        self._global_grad_norm = grad_norm.clip(parameters, max_norm, norm_type, spread=spread)
        return self._global_grad_norm

    def refresh(self) -> None:
        """Update the masters after values of the model were replaced."""
        if self.masters is not None:
            self.masters.refresh()
