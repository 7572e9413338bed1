"""Sharded data parallelism: ranks share the parameters of a copy of the model, by torch's `fully_shard`.

A *shard group* consists of consecutive ranks that together hold one copy; gradients are averaged over the copies.
Each rank sums the microbatches of a step; the last backward pass averages over all copies and shards.

With tensor parallelism, the ranks that hold the same part of each layer form the shard groups: every parameter is
first cut over the tensor group, then over the shard group.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from smddp.modelparallel import delayed
from smddp.modelparallel.checkpointing.tensor_shards import by_name
from smddp.modelparallel.data_parallel import sharded_units, sharded_views
from smddp.modelparallel.pipeline import current
from smddp.modelparallel.pipeline.parts import Part
from smddp.modelparallel.ranks import place
from smddp.modelparallel.tensor.split import SPLIT

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from smddp.modelparallel.ranks import Ranks
    from smddp.smp.v1_keys import Config

log = logging.getLogger("smddp.modelparallel")


def check(config: Config, ranks: Ranks) -> None:
    """Raise ValueError if ``sharded_data_parallel_degree`` does not divide the data-parallel ranks."""
    degree, size = config.sharded_data_parallel_degree, ranks.rdp_size
    if size % degree:
        fitting = ", ".join(str(each) for each in range(1, size + 1) if size % each == 0)
        alike = f" with the same tensor shard ('tensor_parallel_degree'={ranks.tp_size})" if ranks.tp_size > 1 else ""
        raise ValueError(
            f"smp.init(): 'sharded_data_parallel_degree'={degree} does not divide the {size} data-parallel "
            f"ranks{alike}; these do: {fitting}"
        )


class Sharded:
    """A model under `fully_shard`, as `DistributedModel` uses it.

    Args:
        module: the whole model, whose parameters this replaces.
        busy: as `Part` takes it.

    Attributes:
        mesh: (replicate, shard), or (shard) where there is one copy.
        rank, degree: this rank's place in its shard group, and that group's size.
        copy: which copy of the model this rank holds a part of.
    """

    def __init__(self, module: nn.Module, config: Config, ranks: Ranks, busy: Any) -> None:
        self.module = module
        self.degree = config.sharded_data_parallel_degree
        self.rank, self.copy = ranks.rdp_rank % self.degree, ranks.rdp_rank // self.degree
        self.mesh = _mesh(config, ranks)
        self._last = config.microbatches - 1
        self._synced = True
        self._before = {name: (weakref.ref(q), id(q)) for name, q in module.named_parameters()}
        self._became: dict[int, Any] = {}
        self._units: list[Any] = []
        self._kept: list[Any] = []
        self._shard(config)
        # `fully_shard` works at the borders of a module's call, so the part is around these.
        self._part = Part(0, "", module, 0, module, busy)

    def _shard(self, config: Config) -> None:
        # Imported here: not needed without sharding, and slow.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        splits = by_name(self.module)
        if config.fp16 or config.bf16:
            self.module.float()  # the masters
        half = torch.float16 if config.fp16 else torch.bfloat16 if config.bf16 else None
        reduced = None if half is None else torch.float32
        inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced)
        outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduced, output_dtype=reduced)
        modules = sharded_units.units(self.module, config.sdp_reduce_bucket_size)
        sizes = {id(each): max(q.numel() for q in each.parameters()) for each in modules}
        for each in reversed(modules):
            kept = sizes[id(each)] < config.sdp_param_persistence_threshold
            fully_shard(each, mesh=self.mesh, reshard_after_forward=not kept, mp_policy=inner)
            if kept:
                self._kept.append(each)
        fully_shard(self.module, mesh=self.mesh, mp_policy=outer)
        self._units = [*modules, self.module]
        for each in self._units:
            # Ranks may take different branches, and then a parameter has a gradient on some of them only.
            set_unused = getattr(each, "set_reduce_scatter_unused_params", None)
            if set_unused is not None:
                set_unused(True, recurse=False)
        for name, parameter in self.module.named_parameters():
            parameter.__dict__.update({SPLIT: splits[name]} if name in splits else {})
        self._limit_prefetch(modules, config.sdp_max_live_parameters)

    @staticmethod
    def _limit_prefetch(modules: list[Any], most: int) -> None:
        """Prefetch the previous unit during the backward pass of a unit, unless both together are too large."""
        for before, each in zip([None, *modules], modules):
            live = sharded_units.elements(each) + (0 if before is None else sharded_units.elements(before))
            if live > most:
                # It is there already, so this asks for nothing in place of torch's own choice.
                each.set_modules_to_backward_prefetch([each])

    # ---- steps ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current.microbatch is not None:
            return self._part(*args, **kwargs)
        found = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.reshard()
        return found

    def going_back(self, microbatch: int) -> None:
        """Prepare the backward pass of a microbatch; only the last one averages over the ranks."""
        self._synced = microbatch == self._last
        self.module.set_requires_gradient_sync(self._synced)  # type: ignore[operator]
        for each in self._kept:
            each.set_reshard_after_backward(self._synced, recurse=False)

    def finish(self, gradients: bool) -> None:
        """Finish the step."""
        if gradients and not self._synced:
            raise RuntimeError(
                "the step's last microbatch had no model.backward(), which averages the gradients of all of them over "
                "the ranks under 'sharded_data_parallel_degree': let every microbatch call it"
            )
        self.reshard()

    def reshard(self) -> None:
        """Free gathered parameters, so that the next pass gathers new values."""
        for each in self._units:
            each.reshard()

    # ---- parameters ----

    def fill(self, seed: int) -> None:
        """Initialize parameters on the meta device. Parameter objects do not change afterwards."""
        delayed.everywhere(self.module, seed)
        sharded_views.attach(self.module)
        after = dict(self.module.named_parameters())
        # New parameters by the id of the old ones, for an optimizer created before the sharding.
        self._became = {number: (ref, after[name]) for name, (ref, number) in self._before.items()}

    def replace(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer that was created before the sharding."""
        for group in optimizer.param_groups:
            # In place: schedulers and scripts may hold the group.
            group["params"][:] = [self._now(parameter) for parameter in group["params"]]

    def _now(self, parameter: Any) -> Any:
        ref, new = self._became.get(id(parameter), (None, parameter))
        return new if ref is not None and ref() is parameter else parameter


def _mesh(config: Config, ranks: Ranks) -> DeviceMesh:
    """Return the mesh (replicate, shard) of the ranks with the same tensor shard; (shard) for one copy."""
    from torch.distributed.device_mesh import DeviceMesh

    from smddp.sagemaker.parallel import device_type, forget_old_meshes

    forget_old_meshes()
    degrees = config.pipeline_parallel_degree, config.tensor_parallel_degree
    groups = place(ranks.size, config.placement_strategy, *degrees)["rdp"]
    cells = torch.tensor(groups).view(ranks.tp_size, -1, config.sharded_data_parallel_degree)
    mesh = DeviceMesh(device_type(), cells, mesh_dim_names=("tensor", "replicate", "shard"))
    return mesh["shard"] if cells.shape[1] == 1 else mesh["replicate", "shard"]


def of(model: Any) -> Sharded | None:
    """Return the sharding of a model; None for an unsharded model."""
    return getattr(model, "sharded", None)


def writes(ranks: Ranks, model: Any) -> bool:
    """Return True if this rank writes its part of a partial checkpoint; one rank per part does."""
    sharded = of(model)
    return ranks.rdp_rank == 0 if sharded is None else sharded.copy == 0
