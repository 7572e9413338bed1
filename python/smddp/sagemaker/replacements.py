"""The replacements in torch, Accelerate and transformers that `torch_patches.PATCHES` lists; each returns its undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smddp.sagemaker.after_import import after_import

Undo = Callable[[], None]


def _replace(owner: Any, attribute: str, value: Any) -> Undo:
    """Sets an attribute, or an item of a namespace, and returns an undo function."""
    if isinstance(owner, dict):
        before = owner[attribute]
        owner[attribute] = value
        return lambda: owner.__setitem__(attribute, before)
    if attribute not in vars(owner):
        setattr(owner, attribute, value)
        return lambda: delattr(owner, attribute)
    # The entry of the namespace: attribute access would give the function of a static method.
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    return lambda: setattr(owner, attribute, before)


def _all(*undo: Undo) -> Undo:
    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def post_param_init_fn() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp.post_init import with_post_param_init_fn

    original = FullyShardedDataParallel.__init__
    return _replace(FullyShardedDataParallel, "__init__", with_post_param_init_fn(original))


def hybrid_fsdp() -> Undo:
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import hybrid

    original = FullyShardedDataParallel.__init__
    replacement = functools.wraps(original)(hybrid.fsdp_init(original))
    return _all(_replace(FullyShardedDataParallel, "__init__", replacement), hybrid.forget_warnings)


def unsharded_frozen() -> Undo:
    from torch.distributed.fsdp import _runtime_utils

    from smddp.sagemaker.fsdp import hybrid

    replacement = hybrid.registering_again(_runtime_utils._catch_all_reshard)
    return _replace(_runtime_utils, "_catch_all_reshard", replacement)


def hybrid_fully_shard() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    names, found = hybrid.fully_shard_globals()
    if not found:
        raise RuntimeError("this torch's fully_shard has no default mesh to replace: pass mesh= to it, and report this")
    return _all(*(_replace(names, name, hybrid.default_mesh) for name in found))


def optimizers() -> Undo:
    from smddp.sagemaker.fsdp import hybrid, spread_experts

    return _all(spread_experts.replace_in_fully_shard(hybrid.around_fully_shard), hybrid.watch_optimizers())


def cache_flushes() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    return hybrid.watch_cache_flushes()


def offload() -> Undo:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    from smddp.sagemaker import offload
    from smddp.sagemaker.state_handler import state

    replacement = offload.prefetching_forward(OffloadWrapper.forward, lambda: state.activation_loading_horizon)
    undo = _replace(OffloadWrapper, "forward", replacement)

    def undo_both() -> None:
        undo()
        offload.forget_layers()

    return undo_both


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def sharded_optimizer() -> Undo:
    from smddp.sagemaker.fsdp import fsdp1_optimizer

    return fsdp1_optimizer.replace_in_torch()


def fsdp1_parameters() -> Undo:
    from torch.distributed.fsdp._flat_param import FlatParamHandle

    from smddp.sagemaker.fsdp import fsdp1_views
    from smddp.sagemaker.tensor_parallel import replicated

    parameters = fsdp1_views.reuse_parameters(FlatParamHandle._use_unsharded_views)
    gradients = fsdp1_views.giving_gradients(FlatParamHandle._use_sharded_grad_views)
    frozen = fsdp1_views.restore_frozen(FlatParamHandle._init_flat_param_and_metadata)
    accumulated = fsdp1_views.plain_gradients(FlatParamHandle._use_unsharded_grad_views)
    return _all(
        _replace(FlatParamHandle, "_init_flat_param_and_metadata", frozen),
        _replace(FlatParamHandle, "_use_unsharded_grad_views", accumulated),
        _replace(FlatParamHandle, "_use_unsharded_views", parameters),
        _replace(FlatParamHandle, "_use_sharded_grad_views", gradients),
        _replace(
            FlatParamHandle, "_writeback_orig_params", replicated.outside_passes(FlatParamHandle._writeback_orig_params)
        ),
    )


def fsdp2_parameters() -> Undo:
    from smddp.sagemaker.fsdp import hybrid
    from smddp.sagemaker.tensor_parallel import replicated

    kind = hybrid.fully_shard_globals()[0]["FSDPState"]
    return _replace(kind, "_lazy_init", replicated.outside_passes(kind._lazy_init))


def fsdp1_state() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel, _optim_utils
    from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

    from smddp.sagemaker.fsdp import fsdp1_state

    name = "_unflatten_orig_param_states"
    chunk_dtensor = fsdp1_state.chunk_dtensor(DTensorExtensions.chunk_dtensor)
    to_load = staticmethod(fsdp1_state.optim_state_dict_to_load(FullyShardedDataParallel.optim_state_dict_to_load))
    of_optimizer = staticmethod(fsdp1_state.optim_state_dict(FullyShardedDataParallel.optim_state_dict))
    return _all(
        _replace(DTensorExtensions, "chunk_dtensor", chunk_dtensor),
        _replace(_optim_utils, name, fsdp1_state.in_own_memory(getattr(_optim_utils, name))),
        _replace(FullyShardedDataParallel, "optim_state_dict", of_optimizer),
        _replace(FullyShardedDataParallel, "optim_state_dict_to_load", to_load),
    )


def tensor_rank_parts() -> Undo:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    from smddp.sagemaker.distributed.checkpoint import tensor_rank_parts

    # Scripts have bound the names of the public functions already; these are what they call.
    return _all(
        _replace(state_dict_saver, "_save_state_dict", tensor_rank_parts.saving(state_dict_saver._save_state_dict)),
        _replace(state_dict_loader, "_load_state_dict", tensor_rank_parts.loading(state_dict_loader._load_state_dict)),
    )


def older_order() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import fsdp1_state

    to_load = fsdp1_state.either_order(FullyShardedDataParallel.optim_state_dict_to_load)
    return _replace(FullyShardedDataParallel, "optim_state_dict_to_load", staticmethod(to_load))


def tensor_groups_norm() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker import grad_norm

    return _replace(FullyShardedDataParallel, "clip_grad_norm_", grad_norm.clip_grad_norm_)


def agreed_overflow() -> Undo:
    from torch.amp import GradScaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    from smddp.sagemaker.fsdp.grad_scaler import agreed

    kinds = (GradScaler, ShardedGradScaler)
    return _all(*(_replace(kind, "_unscale_grads_", agreed(vars(kind)["_unscale_grads_"])) for kind in kinds))


def adapters() -> Undo:
    from torch.nn.modules.module import register_module_module_registration_hook

    from smddp.sagemaker.tensor_parallel import adapter_hooks

    # The type annotation omits that a hook may return a replacement module.
    return register_module_module_registration_hook(adapter_hooks.on_registration).remove  # type: ignore[arg-type]


def _clients(of_accelerate: str, of_trainer: str) -> Undo:
    """Replacements that functions of `tensor_parallel.accelerate` list, once Accelerate and Trainer are imported."""
    from smddp.sagemaker.tensor_parallel import accelerate

    def made_by(name: str) -> Callable[[Any], Undo]:
        return lambda module: _all(*(_replace(*each) for each in getattr(accelerate, name)(module)))

    return _all(
        after_import("accelerate.accelerator", made_by(of_accelerate)),
        after_import("transformers.trainer", made_by(of_trainer)),
    )


def client_groups() -> Undo:
    return _clients("of_accelerate", "of_trainer")


def client_states() -> Undo:
    return _clients("states_of_accelerate", "states_of_trainer")


def client_loads() -> Undo:
    return _clients("loads", "loads")


def no_distributed_data_parallel() -> Undo:
    from torch.nn.parallel import DistributedDataParallel

    from smddp.sagemaker.fsdp import hybrid

    original = DistributedDataParallel.__init__
    return _replace(DistributedDataParallel, "__init__", hybrid.refusing_shared(original))


def translate_on_save() -> Undo:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel

    from smddp.sagemaker.fsdp import full_state

    init = full_state.config_init(FullStateDictConfig.__init__)
    state_dict = full_state.fsdp_state_dict(FullyShardedDataParallel.state_dict)
    return _all(
        _replace(FullStateDictConfig, "__init__", init),
        _replace(FullyShardedDataParallel, "state_dict", state_dict),
    )


def idle_experts() -> Undo:
    from smddp.sagemaker.fsdp import idle_experts, spread_experts

    return spread_experts.replace_in_fully_shard(idle_experts.around_fully_shard)


def spread_experts() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import spread_experts

    return _all(
        spread_experts.replace_in_fully_shard(spread_experts.around_fully_shard),
        _replace(FullyShardedDataParallel, "__init__", spread_experts.around_fsdp1(FullyShardedDataParallel.__init__)),
    )
