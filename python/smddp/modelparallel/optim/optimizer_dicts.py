"""State dicts of `smp.DistributedOptimizer`: whole, per stage and per replica."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.checkpointing import sharded_state
from smddp.modelparallel.checkpointing import tensor_shards as of_tensors
from smddp.modelparallel.checkpointing.optimizer_state import (
    HELD,
    IS_PARTIAL,
    LOSS_SCALE,
    MASTERS,
    joined_replicas,
    merged,
    of_replicas,
    on_cpu,
)
from smddp.modelparallel.data_parallel import sharded
from smddp.modelparallel.data_parallel.optimizer_shards import Shares
from smddp.modelparallel.optim.half_precision import LossScale, Masters
from smddp.modelparallel.state import state as smp
from smddp.modelparallel.tensor.split import Split, split_of


class OptimizerDicts(torch.optim.Optimizer):
    """Base of `DistributedOptimizer`, which sets the attributes.

    Attributes:
        optimizer: the wrapped optimizer.
        script: the optimizer that the script holds; see `script_optimizer`.
        masters, shares: float32 copies under ``fp16``, and this replica's share under ``shard_optimizer_state``.
    """

    optimizer: torch.optim.Optimizer
    script: Any
    masters: Masters | None
    shares: Shares | None
    _scale: LossScale | None
    _waiting: dict[str, Any] | None
    _cut: bool
    # By group: numbers of all parameters, and of this stage's.
    _all: list[list[int]]
    _held: list[list[int]]
    # Splits of the parameters at the cut, by number.
    _noted: dict[int, Split]
    # Names of this stage's parameters at the cut, by number.
    _names: dict[int, str]
    _stages: int
    _tensor_ranks: int

    @property
    def _shared(self) -> sharded.Sharded | None:
        return sharded.of(smp.model)

    @property
    def held(self) -> list[int]:
        """Return the numbers of the parameters that this stage holds."""
        return [number for numbers in self._held for number in numbers]

    @property
    def stepped(self) -> list[int]:
        """Return the numbers of the parameters whose state this process holds: the stage's, or its shard of them."""
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        return [number for number, parameter in zip(self.held, everything) if self._steps(parameter)]

    def _steps(self, parameter: torch.Tensor) -> bool:
        # The groups of a script's own optimizer hold its share alone.
        if self.shares is None or not self._cut or self.script is not self:
            return True
        return self.shares.mine(parameter) or (self.masters is not None and self.masters.is_master(parameter))

    # False: the parameters in the groups are those of the model, and no views of them.
    redefined_params = False

    def _param_id_to_index(self) -> dict[int, int]:
        """Return the numbers of the parameters in this process's groups, by their `id`."""
        return {id(q): n for n, q in zip(self.held, (q for group in self.param_groups for q in group["params"]))}

    def names(self) -> dict[int, str]:
        """Return the names of this stage's parameters in `model.state_dict()`, by number.

        A script's own float32 copy has the name of the parameter that it replaced.
        """
        number_of = self._param_id_to_index()
        named = () if smp.model is None else smp.model.local_named_parameters()
        found = {number_of[id(parameter)]: name for name, parameter in named if id(parameter) in number_of}
        return dict(sorted({**self._names, **found}.items()))

    def param_name_to_index(self) -> dict[str, int]:
        """Return the numbers of this stage's parameters by name; see `names`."""
        return {name: number for number, name in self.names().items()}

    def local_state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return this stage's part of the state, with the parameter numbers of the whole state.

        Under ``shard_optimizer_state`` its ``state`` is a list, collective over the replicas: of each replica, the
        ``state`` of its `orig_state_dict`. With ``gather_if_shard=False`` it is this replica's shard.
        """
        if self._waiting is not None:
            return self._waiting
        found = self._pack()
        shared = self._shared
        if self.shares is not None and self._cut and gather_if_shard:
            found[IS_PARTIAL] = self._stages * self._tensor_ranks > 1
            parts, numbers = zip(*self.shares.gather((on_cpu(found), self.held)))
            return of_replicas(list(parts), list(numbers))
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
        shared = len(stepped) < len(held) or (self.shares is not None and self.script is not self)
        partial = self._stages * self._tensor_ranks > 1 or shared
        return {**packed, IS_PARTIAL: partial, HELD: stepped, **of_tensors.encode(self._splits())}

    def _splits(self) -> dict[int, Split]:
        """Return the splits of this stage's shared parameters by number.

        A script's own float32 copy of a parameter is split as the parameter that it replaced.
        """
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        found = ((number, split_of(parameter)) for number, parameter in zip(self.held, parameters))
        return {**self._noted, **{number: split for number, split in found if split is not None}}

    def state_dict(self, gather_if_shard: bool = True) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole state, as in one process. Collective over all ranks with a part of it, after the cut."""
        if not self._cut:
            return self.optimizer.state_dict() if self._waiting is None else self._waiting
        if self._shared is not None:
            return merged([sharded_state.whole(of_tensors.of_optimizer(self._pack(), self._splits()))])
        own = of_tensors.of_optimizer(joined_replicas(self.local_state_dict()), self._splits())
        if self._stages == 1:
            return merged([own])
        assert smp.ranks is not None  # as there is an optimizer
        found: list[Any] = [None] * self._stages
        dist.all_gather_object(found, on_cpu(own), group=smp.ranks.pp_group)
        return merged(found)

    def orig_state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's own state: that of the parameters which this process steps."""
        return self.optimizer.state_dict()

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict[str, Any]:
        """Return `local_state_dict`, under the name of release 1.10."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:
        """Load what `save_optimizer_backcompat` returned, as `load_state_dict` does."""
        self.load_state_dict(state_dict, gather_if_shard)

    def load_state_dict(self, state_dict: dict[str, Any], gather_if_shard: bool = True) -> None:  # type: ignore[override]
        """Load a whole state, or this stage's part of one. Before the cut, loading is delayed until the cut.

        ``gather_if_shard`` changes nothing: a share records what it holds.

        Raises ValueError for groups of other sizes, or a part that lacks parameters of this stage.
        """
        del gather_if_shard
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("load_state_dict() takes what state_dict() or local_state_dict() gave")
        state_dict = joined_replicas(state_dict)
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
        """Return this rank's part of the state of a parameter."""
        split = self._splits().get(self.held[index])
        if split is None:
            return values
        return {key: split.mine(x) if isinstance(x, torch.Tensor) else x for key, x in values.items()}

    def _load_what_waits(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._load(waiting)

    def _load(self, loaded: dict[str, Any]) -> None:
        if smp.ranks is not None:
            of_tensors.check_place(loaded, smp.ranks.tp_rank, smp.ranks.tp_size, "an optimizer's state")
        held, stepped = self.held, set(self.stepped)
        missing = sorted(stepped - set(loaded.get(HELD, stepped)))
        if missing:
            raise ValueError(
                f"this part of an optimizer's state was saved under another cut: it lacks {len(missing)} of this "
                f"stage's {len(held)} parameters, number {missing[0]} among them; resume_from_checkpoint() finds them"
            )
        local_of = {number: index for index, number in enumerate(held)}
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        # A whole state numbers parameters in the order of its groups' lists.
        order = [number for group in loaded["param_groups"] for number in group["params"]]
        number_of = dict(zip(order, (number for numbers in self._all for number in numbers)))
        state = {
            given: self._part(local_of[number_of[given]], value)
            for given, value in loaded["state"].items()
            if number_of.get(given) in stepped
        }
        if (shared := self._shared) is not None:
            sharded_state.check_place(loaded, shared.rank, shared.degree, "an optimizer's state")
            pieces = loaded.get(sharded_state.SHARD, {}).get("names", ())
            parameters = {given: own[local_of[number_of[given]]] for given in state}
            state = sharded_state.for_optimizer(state, pieces, parameters)
        values = {local_of[number_of[given]]: value for given, value in state.items()}
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
