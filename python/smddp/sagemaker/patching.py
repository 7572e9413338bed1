"""Every change that `torch.sagemaker` makes to torch, in one table: what, when, why, and how it is undone.

Two patches are made when `torch.sagemaker` is imported, since scripts bind those names before `tsm.init()`. The
others are made by `init`, each only when the configuration asks for it, and undone by `tsm.state.reset()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smddp.sagemaker.after_import import after_import
from smddp.sagemaker.parallel import Layout

Undo = Callable[[], None]


@dataclass(frozen=True)
class Patch:
    """One change of torch.

    Attributes:
        name: short name.
        target: what in torch behaves differently while the patch is active.
        why: what it is for.
        apply: makes the change and returns what undoes it.
        wanted: of the configuration and the layout; None for a patch made at import.
    """

    name: str
    target: str
    why: str
    apply: Callable[[], Undo]
    wanted: Callable[[dict[str, Any], Layout], bool] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.target}: {self.why}"


def _replace(owner: Any, attribute: str, value: Any) -> Undo:
    """Sets an attribute, or an item of a namespace, and returns what restores it."""
    if isinstance(owner, dict):
        before = owner[attribute]
        owner[attribute] = value
        return lambda: owner.__setitem__(attribute, before)
    if attribute not in vars(owner):
        setattr(owner, attribute, value)
        return lambda: delattr(owner, attribute)
    # As it lies there: a static method is more than the function that attribute access gives.
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    return lambda: setattr(owner, attribute, before)


def _all(*undo: Undo) -> Undo:
    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _post_param_init_fn() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.delayed_param.fsdp import with_post_param_init_fn

    original = FullyShardedDataParallel.__init__
    return _replace(FullyShardedDataParallel, "__init__", with_post_param_init_fn(original))


def _hybrid_fsdp() -> Undo:
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker import sharding

    original = FullyShardedDataParallel.__init__
    replacement = functools.wraps(original)(sharding.fsdp_init(original))
    return _all(_replace(FullyShardedDataParallel, "__init__", replacement), sharding.forget_warnings)


def _unsharded_frozen() -> Undo:
    from torch.distributed.fsdp import _runtime_utils

    from smddp.sagemaker import sharding

    replacement = sharding.registering_again(_runtime_utils._catch_all_reshard)
    return _replace(_runtime_utils, "_catch_all_reshard", replacement)


def _hybrid_fully_shard() -> Undo:
    from smddp.sagemaker import sharding

    names, found = sharding.fully_shard_globals()
    if not found:
        raise RuntimeError("this torch's fully_shard has no default mesh to replace: pass mesh= to it, and report this")
    return _all(*(_replace(names, name, sharding.default_mesh) for name in found))


def _optimizers() -> Undo:
    from smddp.sagemaker import sharding
    from smddp.sagemaker.expert_parallel import fsdp

    return _all(fsdp.replace_in_fully_shard(sharding.around_fully_shard), sharding.watch_optimizers())


def _cache_flushes() -> Undo:
    from smddp.sagemaker import sharding

    return sharding.watch_cache_flushes()


def _offload() -> Undo:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    from smddp.sagemaker import offload
    from smddp.sagemaker.state_handler import state

    replacement = offload.prefetching_forward(OffloadWrapper.forward, lambda: state.activation_loading_horizon)
    undo = _replace(OffloadWrapper, "forward", replacement)

    def undo_both() -> None:
        undo()
        offload.forget_layers()

    return undo_both


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _sharded_optimizer() -> Undo:
    from smddp.sagemaker.distributed.checkpoint import optimizer

    return optimizer.replace_in_torch()


def _fsdp1_parameters() -> Undo:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    from smddp.sagemaker.tensor_parallel import fsdp1, whole

    parameters = fsdp1.keeping_parameters(FlatParamHandle._use_unsharded_views)
    gradients = fsdp1.giving_gradients(FlatParamHandle._use_sharded_grad_views)
    frozen = fsdp1.keeping_frozen(FlatParamHandle._init_flat_param_and_metadata)
    accumulated = fsdp1.plain_gradients(FlatParamHandle._use_unsharded_grad_views)
    return _all(
        _replace(FlatParamHandle, "_init_flat_param_and_metadata", frozen),
        _replace(FlatParamHandle, "_use_unsharded_grad_views", accumulated),
        _replace(FlatParamHandle, "_use_unsharded_views", parameters),
        _replace(FlatParamHandle, "_use_sharded_grad_views", gradients),
        _replace(
            FlatParamHandle, "_writeback_orig_params", whole.outside_passes(FlatParamHandle._writeback_orig_params)
        ),
    )


def _fsdp2_parameters() -> Undo:
    from smddp.sagemaker import sharding
    from smddp.sagemaker.tensor_parallel import whole

    kind = sharding.fully_shard_globals()[0]["FSDPState"]
    return _replace(kind, "_lazy_init", whole.outside_passes(kind._lazy_init))


def _fsdp1_chunks() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel, _optim_utils
    from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

    from smddp.sagemaker.distributed.checkpoint import fsdp1_chunks

    name = "_unflatten_orig_param_states"
    chunk_dtensor = fsdp1_chunks.chunk_dtensor(DTensorExtensions.chunk_dtensor)
    to_load = staticmethod(fsdp1_chunks.optim_state_dict_to_load(FullyShardedDataParallel.optim_state_dict_to_load))
    of_optimizer = staticmethod(fsdp1_chunks.optim_state_dict(FullyShardedDataParallel.optim_state_dict))
    return _all(
        _replace(DTensorExtensions, "chunk_dtensor", chunk_dtensor),
        _replace(_optim_utils, name, fsdp1_chunks.in_own_memory(getattr(_optim_utils, name))),
        _replace(FullyShardedDataParallel, "optim_state_dict", of_optimizer),
        _replace(FullyShardedDataParallel, "optim_state_dict_to_load", to_load),
    )


def _tensor_parts() -> Undo:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from smddp.sagemaker.distributed.checkpoint import tensor_parts

    # Scripts have bound the names of the public functions already; these are what they call.
    return _all(
        _replace(state_dict_saver, "_save_state_dict", tensor_parts.saving(state_dict_saver._save_state_dict)),
        _replace(state_dict_loader, "_load_state_dict", tensor_parts.loading(state_dict_loader._load_state_dict)),
    )


def _older_order() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.distributed.checkpoint import fsdp1_chunks

    to_load = fsdp1_chunks.either_order(FullyShardedDataParallel.optim_state_dict_to_load)
    return _replace(FullyShardedDataParallel, "optim_state_dict_to_load", staticmethod(to_load))


def _tensor_groups_norm() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker import grad_norm

    return _replace(FullyShardedDataParallel, "clip_grad_norm_", grad_norm.clip_grad_norm_)


def _agreed_overflow() -> Undo:
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from smddp.sagemaker.grad_scaler import agreed

    kinds = (GradScaler, ShardedGradScaler)
    return _all(*(_replace(kind, "_unscale_grads_", agreed(vars(kind)["_unscale_grads_"])) for kind in kinds))


def _adapters() -> Undo:
    from torch.nn.modules.module import register_module_module_registration_hook

    from smddp.sagemaker.tensor_parallel import injection

    # Its type does not say that a hook may return what becomes part instead.
    return register_module_module_registration_hook(injection.on_registration).remove  # type: ignore[arg-type]


def _clients(of_accelerate: str, of_trainer: str) -> Undo:
    """Replacements that functions of `tensor_parallel.accelerate` list, once Accelerate and Trainer are imported."""
    from smddp.sagemaker.tensor_parallel import accelerate

    def made_by(name: str) -> Callable[[Any], Undo]:
        return lambda module: _all(*(_replace(*each) for each in getattr(accelerate, name)(module)))

    return _all(
        after_import("accelerate.accelerator", made_by(of_accelerate)),
        after_import("transformers.trainer", made_by(of_trainer)),
    )


def _client_groups() -> Undo:
    return _clients("of_accelerate", "of_trainer")


def _client_states() -> Undo:
    return _clients("states_of_accelerate", "states_of_trainer")


def _no_distributed_data_parallel() -> Undo:
    from torch.nn.parallel import DistributedDataParallel

    from smddp.sagemaker import sharding

    original = DistributedDataParallel.__init__
    return _replace(DistributedDataParallel, "__init__", sharding.refusing_shared(original))


def _translate_on_save() -> Undo:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel

    from smddp.sagemaker.distributed.checkpoint import full_state_dict

    init = full_state_dict.config_init(FullStateDictConfig.__init__)
    state_dict = full_state_dict.fsdp_state_dict(FullyShardedDataParallel.state_dict)
    return _all(
        _replace(FullStateDictConfig, "__init__", init),
        _replace(FullyShardedDataParallel, "state_dict", state_dict),
    )


def _idle_experts() -> Undo:
    from smddp.sagemaker import idle_experts
    from smddp.sagemaker.expert_parallel import fsdp

    return fsdp.replace_in_fully_shard(idle_experts.around_fully_shard)


def _spread_experts() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.expert_parallel import fsdp

    return _all(
        fsdp.replace_in_fully_shard(fsdp.around_fully_shard),
        _replace(FullyShardedDataParallel, "__init__", fsdp.around_fsdp1(FullyShardedDataParallel.__init__)),
    )


PATCHES = (
    Patch(
        "post_param_init_fn",
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "takes post_param_init_fn, which scripts always pass, and calls it with each module after param_init_fn",
        _post_param_init_fn,
    ),
    Patch(
        "sharded_optimizer",
        "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict",
        "it takes process_group, and cuts the state as the parameters are cut",
        _sharded_optimizer,
    ),
    Patch(
        "translate_on_save",
        "FullStateDictConfig.__init__ and FullyShardedDataParallel.state_dict",
        "full state dicts come in Hugging Face names and shapes; translate_on_save=False turns that off",
        _translate_on_save,
        lambda values, sizes: True,
    ),
    Patch(
        "hybrid_fsdp",
        "torch.distributed.fsdp.FullyShardedDataParallel.__init__",
        "a call without process_group and device_mesh gets the mesh and strategy of hybrid_shard_degree",
        _hybrid_fsdp,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "unsharded_frozen",
        "_catch_all_reshard of FSDP1",
        "frozen units that hybrid_shard_degree=1 does not shard are in state dicts after a backward pass, too",
        _unsharded_frozen,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "hybrid_fully_shard",
        "the default mesh of torch.distributed.fsdp.fully_shard",
        "a call without mesh gets the (replicate, shard) mesh, or the shard dimension alone for one copy",
        _hybrid_fully_shard,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "idle_experts",
        "what torch.distributed.fsdp.fully_shard calls",
        "experts in a list that a rank's tokens have not chosen take part in its reductions",
        _idle_experts,
        lambda values, sizes: True,
    ),
    Patch(
        "spread_experts",
        "what fully_shard calls, and FullyShardedDataParallel.__init__",
        "experts are sharded over the ranks that hold the same ones",
        _spread_experts,
        lambda values, sizes: sizes.expert > 1,
    ),
    Patch(
        "fsdp1_parameters",
        "views of FlatParamHandle on parameters and gradients, and its _init_flat_param_and_metadata",
        "tensor-parallel parameters of units that are not sharded stay the ones that the optimizer holds, all of them "
        "accumulate gradients in no_sync(), and frozen ones stay frozen",
        _fsdp1_parameters,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "fsdp2_parameters",
        "FSDPState._lazy_init of torch.distributed.fsdp.fully_shard",
        "it finds the parameters of modules that no plan names, inside forward passes of a part of the model, too",
        _fsdp2_parameters,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "fsdp1_grad_norm",
        "torch.distributed.fsdp.FullyShardedDataParallel.clip_grad_norm_",
        "its norm is the sum over the ranks of the tensor group, too, as torch.sagemaker.grad_norm has it",
        _tensor_groups_norm,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "grad_scaler",
        "_unscale_grads_ of torch.amp.GradScaler and FSDP's ShardedGradScaler",
        "all ranks skip a step in which a gradient of one rank overflows",
        _agreed_overflow,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "adapters",
        "what a torch.nn.Module does with a module that becomes part of it (a global hook)",
        "adapters of layers that are shared already are shared as they come",
        _adapters,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "clients",
        "accelerate.Accelerator (__init__, prepare, gather, reduce) and transformers.Trainer (once they are imported)",
        "a tensor group gets the same samples and counts as one process; other degrees are refused",
        _client_groups,
        lambda values, sizes: sizes.tensor > 1,
    ),
    Patch(
        "client_states",
        "accelerate.Accelerator.save_state and load_state, and transformers.Trainer.train (once they are imported)",
        "checkpoints that would hold one rank's part of the optimizer are refused",
        _client_states,
        lambda values, sizes: sizes.tensor > 1 or sizes.expert > 1,
    ),
    Patch(
        "no_ddp",
        "torch.nn.parallel.DistributedDataParallel.__init__",
        "it cannot take the parameters of a transformed model: say what can",
        _no_distributed_data_parallel,
        lambda values, sizes: sizes.tensor > 1 or sizes.expert > 1,
    ),
    Patch(
        "fsdp1_chunks",
        "DTensorExtensions.chunk_dtensor, and optim_state_dict(_to_load) of FullyShardedDataParallel",
        "sharded state dicts are cut over the shard dimension, and loaded over the tensor dimension; those of flat "
        "parameters are made by any group; full ones have copies of each state",
        _fsdp1_chunks,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "tensor_parts",
        "_save_state_dict and _load_state_dict of torch.distributed.checkpoint",
        "the group of one tensor rank saves and loads that rank's part, and its coordinator may be a global rank",
        _tensor_parts,
        lambda values, sizes: True,
    ),
    Patch(
        "older_order",
        "FullyShardedDataParallel.optim_state_dict_to_load",
        "it takes its first three arguments in the order of torch 2.0, too, as older scripts give them",
        _older_order,
        lambda values, sizes: True,
    ),
    Patch(
        "optimizer_order",
        "what fully_shard calls, and every torch.optim.Optimizer step (a step hook)",
        "an optimizer with parameters that FSDP replaced, and replicas with different values, are errors",
        _optimizers,
        lambda values, sizes: not sizes.native,
    ),
    Patch(
        "activation_offloading",
        "OffloadWrapper.forward, of torch's offload_wrapper",
        "checkpointed layers' inputs leave for the host and come back activation_loading_horizon layers ahead",
        _offload,
        lambda values, sizes: values["sm_activation_offloading"],
    ),
    Patch(
        "cache_flush_warnings",
        "every torch.optim.Optimizer step (a step hook)",
        "warn when the CUDA caching allocator flushed its cache",
        _cache_flushes,
        lambda values, sizes: values["fsdp_cache_flush_warnings"] and _has_gpu(),
    ),
)

# In the order in which they were made.
_active: dict[str, Undo] = {}


def patches() -> list[Patch]:
    """The patches of torch that are active now, in the order in which they were made."""
    by_name = {patch.name: patch for patch in PATCHES}
    return [by_name[name] for name in _active]


def apply_import() -> None:
    """Make the patches that scripts need before `init`. Idempotent."""
    for patch in PATCHES:
        if patch.wanted is None and patch.name not in _active:
            _active[patch.name] = patch.apply()


def apply_init(values: dict[str, Any], sizes: Layout) -> None:
    """Make the patches that this configuration asks for."""
    for patch in PATCHES:
        if patch.wanted is not None and patch.name not in _active and patch.wanted(values, sizes):
            _active[patch.name] = patch.apply()


def undo_init() -> None:
    """Undo what `apply_init` did, the last first."""
    at_init = {patch.name for patch in PATCHES if patch.wanted is not None}
    for name in [name for name in reversed(_active) if name in at_init]:
        _active.pop(name)()


def undo_all() -> None:
    """Undo every patch, those of the import too; `apply_import` makes the latter again."""
    undo_init()
    for name in list(reversed(_active)):
        _active.pop(name)()
