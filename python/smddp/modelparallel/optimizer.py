"""`smp.DistributedOptimizer`: the script's optimizer over this stage's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel import grad_norm, sharded, sharded_state, sharded_views
from smddp.modelparallel.half import LossScale, Masters
from smddp.modelparallel.optimizer_state import HELD, IS_PARTIAL, LOSS_SCALE, MASTERS, merged, on_cpu
from smddp.modelparallel.sharded_half import Unscaled
from smddp.modelparallel.shares import Shares
from smddp.modelparallel.state import state as smp
from smddp.modelparallel.tensor import whole as of_tensors
from smddp.modelparallel.tensor.split import Split, follow, split_of


class DistributedOptimizer(torch.optim.Optimizer):
    """The optimizer that it wraps, which at the cut loses the parameters of other stages.

    Parameters keep the numbers that they have in one process, so a whole state is that of the same optimizer in one
    process, and a state saved under one cut loads under another. A state that is loaded before the cut waits for it.

    Args:
        optimizer: over the whole model's parameters.
        static_loss_scale: under the key ``fp16``, what the loss is multiplied by.
        dynamic_loss_scale: as large a scale as gradients stay finite; a step whose gradients do not is left out.
        dynamic_loss_args: see `LossScale`; the original's keyword arguments of these names do, too.
    """

    # accelerate would wrap it once more, and its wrapper takes state dicts apart.
    _is_accelerate_prepared = True
    # `GradScaler` unscales for it.
    _step_supports_amp_scaling = False

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
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, DistributedOptimizer):
            raise TypeError(f"smp.DistributedOptimizer() takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
        options = {**(dynamic_loss_args or {}), **loss_args}
        self._scale: LossScale | None = None
        if cfg.fp16:
            self._scale = LossScale(static_loss_scale, dynamic_loss_scale, options)
        elif dynamic_loss_scale or options or static_loss_scale not in (None, 1.0):
            raise ValueError(
                "smp.DistributedOptimizer(): loss scales need the key 'fp16': True; or run the step under "
                "torch.autocast, with smp.amp.GradScaler"
            )
        self.masters: Masters | None = None
        self._overflow = False
        self.optimizer = optimizer
        # What the norm of a sharded model's gradients is held to in each step; 0: nothing is.
        self._clip_to = cfg.sdp_gradient_clipping
        self.shares = Shares(ranks) if cfg.shard_optimizer_state and ranks.rdp_size > 1 else None
        self._stages, self._tensor_ranks = ranks.pp_size, ranks.tp_size
        follow(optimizer)
        self._waiting: dict[str, Any] | None = None
        self._cut = False
        self._all: list[list[int]] = []
        self._held: list[list[int]] = []
        self._number()
        self._global_grad_norm: torch.Tensor | None = None
        smp.optimizer = self
        if smp.model is not None and smp.model.partitioned:
            if self._shared is not None:
                self._shared.replace(optimizer)
            self._lose_others()

    @property
    def _shared(self) -> sharded.Sharded | None:
        return sharded.of(smp.model)

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
        """Give the parameters of groups that are new the next numbers, as torch counts them in a state dict."""
        for group in self.optimizer.param_groups[len(self._all) :]:
            first = sum(map(len, self._all))
            numbers = list(range(first, first + len(group["params"])))
            self._all.append(numbers)
            self._held.append(list(numbers))

    @property
    def held(self) -> list[int]:
        """The numbers of the parameters that this stage holds."""
        return [number for numbers in self._held for number in numbers]

    @property
    def stepped(self) -> list[int]:
        """The numbers of those whose state this process holds: all of the stage's, or its share of them."""
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        return [number for number, parameter in zip(self.held, everything) if self._steps(parameter)]

    def _steps(self, parameter: torch.Tensor) -> bool:
        if self.shares is None or not self._cut:
            return True
        return self.shares.mine(parameter) or (self.masters is not None and self.masters.is_master(parameter))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; after the cut only this stage's parameters stay in the group."""
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
        """The model was cut: ``parameters`` belong to other stages. What waited to be loaded is loaded."""
        lost = {id(parameter): parameter for parameter in parameters}
        for group, numbers in zip(self.param_groups, self._held):
            kept = [(n, parameter) for n, parameter in zip(numbers, group["params"]) if id(parameter) not in lost]
            # In place: schedulers and scripts may hold the group.
            group["params"] = [parameter for _, parameter in kept]
            numbers[:] = [number for number, _ in kept]
        for parameter in lost.values():
            self.optimizer.state.pop(parameter, None)
        self._cut = True
        if self.shares is not None:
            masters = self.masters.is_master if self.masters is not None else (lambda parameter: False)
            self.shares.divide(q for group in self.param_groups for q in group["params"] if not masters(q))
        if self._scale is not None:
            self.masters = self.masters or (Masters() if self._shared is None else Unscaled())
            self.masters.adopt(self.optimizer, self._steps)
        self._load_what_waits()

    # ---- steps ----

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        """As the wrapped optimizer's, over this stage's parameters."""
        self._load_what_waits()
        if self.masters is None or self._scale is None:
            self._clip_shared()
            if self.shares is not None:
                return self._step_share(closure)
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None:
            raise ValueError("step(closure) is not there under 'fp16': the loss is scaled in the step before")
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
        """Step this replica's share of the parameters, and have those of the others."""
        if closure is not None:
            raise ValueError("step(closure) is not there under 'shard_optimizer_state'")
        assert self.shares is not None  # `step` has looked
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's, over this stage's parameters."""
        self.optimizer.zero_grad(set_to_none)
        if self.masters is not None:
            self.masters.zero_grad()

    @property
    def loss_scale(self) -> float:
        """What `model.backward` multiplies the loss by: 1 without ``fp16``."""
        return 1.0 if self._scale is None else self._scale.scale

    @property
    def overflow(self) -> bool:
        """Whether the last step found gradients that are not finite, on any stage; False without ``fp16``."""
        return self._overflow

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step left the parameters as they were; see `overflow`."""
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
        """The model was given other values."""
        if self.masters is not None:
            self.masters.refresh()

    # ---- state dicts ----

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """This stage's part of the state, its parameters under the numbers that they have in the whole.

        Under ``shard_optimizer_state`` it is put together of the replicas' shares, which is collective over them; with
        ``gather_if_shard=False`` it is this replica's share.
        """
        if self._waiting is not None:
            return self._waiting
        found = self._pack()
        shared = self._shared
        if self.shares is not None and self._cut and gather_if_shard:
            partial = {IS_PARTIAL: self._stages * self._tensor_ranks > 1, HELD: self.held}
            return {**merged(self.shares.gather(on_cpu(found))), **partial}
        return found if shared is None else sharded_state.local_optimizer(found, shared.rank, shared.degree)

    def _pack(self) -> dict[str, Any]:
        packed = self.optimizer.state_dict()
        held = self.held
        packed["state"] = {held[index]: values for index, values in packed["state"].items()}
        for group, numbers in zip(packed["param_groups"], self._all):
            group["params"] = list(numbers)
        if self.masters is not None and self._scale is not None:
            packed[LOSS_SCALE] = self._scale.state_dict()
            if self._shared is None:
                values = [master for group in self.param_groups for master in group["params"]]
                packed[MASTERS] = {number: q for number, q in zip(held, values) if self._steps(q)}
        stepped = self.stepped
        partial = self._stages * self._tensor_ranks > 1 or len(stepped) < len(held)
        return {**packed, IS_PARTIAL: partial, HELD: stepped, **of_tensors.told(self._splits())}

    def _splits(self) -> dict[int, Split]:
        """How this rank's parameters are split, by their number, of those that are."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        found = ((number, split_of(parameter)) for number, parameter in zip(self.held, parameters))
        return {number: split for number, split in found if split is not None}

    def state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:  # type: ignore[override]
        """The whole state, as in one process. Collective over all that hold parts of it, once the model is cut."""
        if not self._cut:
            return self.optimizer.state_dict() if self._waiting is None else self._waiting
        if self._shared is not None:
            return merged([sharded_state.whole(self._pack())])
        own = of_tensors.of_optimizer(self.local_state_dict(), self._splits())
        if self._stages == 1:
            return merged([own])
        assert smp.ranks is not None  # as there is an optimizer
        found: list[Any] = [None] * self._stages
        dist.all_gather_object(found, on_cpu(own), group=smp.ranks.pp_group)
        return merged(found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a whole state, or this stage's part of one. Before the cut it waits.

        Raises ValueError for groups of other sizes, or a part that lacks parameters of this stage.
        """
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("load_state_dict() takes what state_dict() or local_state_dict() gave")
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != list(map(len, self._all)):
            raise ValueError(
                f"the optimizer has groups of {list(map(len, self._all))} parameters, the loaded state of {sizes}"
            )
        ranks = self._stages * self._tensor_ranks
        if not self._cut and (ranks > 1 or self._scale is not None or self.shares is not None):
            self._waiting = state_dict
            return
        self._load(state_dict)

    def _part(self, index: int, values: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, of which a tensor group's rank keeps its part."""
        split = split_of([parameter for group in self.param_groups for parameter in group["params"]][index])
        if split is None:
            return values
        return {key: split.mine(x) if isinstance(x, torch.Tensor) else x for key, x in values.items()}

    def _load_what_waits(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._load(waiting)

    def _load(self, loaded: dict[str, Any]) -> None:
        held, stepped = self.held, set(self.stepped)
        missing = sorted(stepped - set(loaded.get(HELD, stepped)))
        if missing:
            raise ValueError(
                f"this part of an optimizer's state was saved under another cut: it lacks {len(missing)} of this "
                f"stage's {len(held)} parameters, number {missing[0]} among them; resume_from_checkpoint() finds them"
            )
        local_of = {number: index for index, number in enumerate(held)}
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        # A whole state numbers parameters in order of its groups' lists.
        order = [number for group in loaded["param_groups"] for number in group["params"]]
        number_of = dict(zip(order, (number for numbers in self._all for number in numbers)))
        if (shared := self._shared) is not None:
            sharded_state.check_place(loaded, shared.rank, shared.degree, "an optimizer's state")
            known = {given: own[local_of[number]] for given, number in number_of.items() if number in local_of}
            loaded = sharded_state.for_optimizer(loaded, known)
        values = {
            local_of[number_of[given]]: self._part(local_of[number_of[given]], value)
            for given, value in loaded["state"].items()
            if number_of.get(given) in stepped
        }
        groups = [
            {**group, "params": [local_of[number] for number in numbers]}
            for group, numbers in zip(loaded["param_groups"], self._held)
        ]
        self.optimizer.load_state_dict({"state": values, "param_groups": groups})
        if self.masters is None or self._scale is None or LOSS_SCALE not in loaded:
            return
        self._scale.load_state_dict(loaded[LOSS_SCALE])
        if self._shared is None and MASTERS in loaded:
            with torch.no_grad():
                for given, value in loaded[MASTERS].items():
                    if number_of.get(given) in stepped:
                        index = local_of[number_of[given]]
                        own[index].copy_(self._part(index, {MASTERS: value})[MASTERS])
            self.masters.give()
