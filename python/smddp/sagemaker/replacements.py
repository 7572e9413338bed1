"""The replacements in torch, Accelerate and transformers that `torch_patches.PATCHES` lists; each returns its undo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from smddp.sagemaker import in_place
from smddp.sagemaker import private_names as private
from smddp.sagemaker.after_import import after_import
from smddp.sagemaker.private_names import MissingNameError, PrivateName

Undo = Callable[[], None]


def _replace(owner: Any, attribute: str, value: Any) -> Undo:
    """Sets an attribute and returns an undo function."""
    if attribute not in vars(owner):
        setattr(owner, attribute, value)
        return lambda: delattr(owner, attribute)
    # The entry of the namespace: attribute access would give the function of a static method.
    before = vars(owner)[attribute]
    setattr(owner, attribute, value)
    return lambda: setattr(owner, attribute, before)


def _all(*undo: Undo) -> Undo:
    def undo_all() -> None:
        for one in reversed(undo):
            one()

    return undo_all


def _around(name: PrivateName, change: Callable[[Any], Any]) -> Undo:
    """Replaces what a private name stands for; raises MissingNameError if this torch lacks it."""
    return _replace(name.owner(), name.attribute, change(name.get()))


def _raising(error: MissingNameError, wanted: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a wrapper that raises ``error`` in calls for which ``wanted(*args, **kwargs)`` is true."""

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def unavailable(*args: Any, **kwargs: Any) -> Any:
            if wanted(*args, **kwargs):
                raise error
            return original(*args, **kwargs)

        return unavailable

    return around


def _always(*_: Any, **__: Any) -> bool:
    return True


# Substitutes for patches whose private name is missing: the feature raises the error where it is used.


def without_fsdp1(error: MissingNameError) -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    original = FullyShardedDataParallel.__init__
    return _replace(FullyShardedDataParallel, "__init__", _raising(error, _always)(original))


def without_fully_shard(error: MissingNameError) -> Undo:
    return in_place.wrap(_fully_shard(), _raising(error, _always))


def without_scaling(error: MissingNameError) -> Undo:
    from torch.amp import GradScaler

    return _replace(GradScaler, "scale", _raising(error, lambda scaler, *_: scaler.is_enabled())(GradScaler.scale))


def without_group_checkpoints(error: MissingNameError) -> Undo:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    # The deprecated functions have it as their third parameter, too.
    def by_group(*positional: Any, process_group: Any = None, **_: Any) -> bool:
        return process_group is not None or any(each is not None for each in positional[2:3])

    functions = (
        *(getattr(state_dict_saver, name) for name in ("save", "save_state_dict", "async_save")),
        *(getattr(state_dict_loader, name) for name in ("load", "load_state_dict")),
    )
    return _all(*(in_place.wrap(each, _raising(error, by_group)) for each in functions))


def without_offload(error: MissingNameError) -> Undo:
    for name in (private.OFFLOAD_WRAPPER, private.CHECKPOINT_WRAPPER, private.GRAPH_TASK):
        name.find_or_warn()
    return lambda: None


def _fully_shard() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def post_param_init_fn() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp.post_init import with_post_param_init_fn

    original = FullyShardedDataParallel.__init__
    return _replace(FullyShardedDataParallel, "__init__", with_post_param_init_fn(original))


def hybrid_fsdp() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import hybrid

    original = FullyShardedDataParallel.__init__
    replacement = functools.wraps(original)(hybrid.fsdp_init(original))
    return _all(_replace(FullyShardedDataParallel, "__init__", replacement), hybrid.forget_warnings)


def unsharded_frozen() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    return _around(private.CATCH_RESHARD, hybrid.registering_again)


def gloo_average() -> Undo:
    from smddp.sagemaker.fsdp import gloo_average

    return in_place.wrap(_fully_shard(), gloo_average.around_fully_shard)


def hybrid_fully_shard() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    return in_place.wrap(_fully_shard(), hybrid.with_default_mesh)


def optimizers() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    return _all(in_place.wrap(_fully_shard(), hybrid.around_fully_shard), hybrid.watch_optimizers())


def cache_flushes() -> Undo:
    from smddp.sagemaker.fsdp import hybrid

    return hybrid.watch_cache_flushes()


def offload() -> Undo:
    from smddp.sagemaker import offload
    from smddp.sagemaker.state_handler import state

    kind = private.OFFLOAD_WRAPPER.get()
    private.CHECKPOINT_WRAPPER.get()
    private.GRAPH_TASK.get()
    replacement = offload.prefetching_forward(kind.forward, lambda: state.activation_loading_horizon)
    undo = _replace(kind, "forward", replacement)

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
    from smddp.sagemaker.fsdp import fsdp1_views
    from smddp.sagemaker.tensor_parallel import replicated

    changes = (
        (private.INIT_FLAT_PARAM, fsdp1_views.restore_frozen),
        (private.UNSHARDED_GRAD_VIEWS, fsdp1_views.plain_gradients),
        (private.UNSHARDED_VIEWS, fsdp1_views.reuse_parameters),
        (private.SHARDED_GRAD_VIEWS, fsdp1_views.giving_gradients),
        (private.WRITE_BACK, replicated.outside_passes),
    )
    for name, _ in changes:  # all or none
        name.get()
    return _all(*(_around(*each) for each in changes))


def fsdp2_parameters() -> Undo:
    from smddp.sagemaker.tensor_parallel import replicated

    return _around(private.LAZY_INIT, replicated.outside_passes)


def fsdp1_state() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

    from smddp.sagemaker.fsdp import fsdp1_state

    chunk_dtensor = fsdp1_state.chunk_dtensor(DTensorExtensions.chunk_dtensor)
    to_load = staticmethod(fsdp1_state.optim_state_dict_to_load(FullyShardedDataParallel.optim_state_dict_to_load))
    of_optimizer = staticmethod(fsdp1_state.optim_state_dict(FullyShardedDataParallel.optim_state_dict))
    return _all(
        _replace(DTensorExtensions, "chunk_dtensor", chunk_dtensor),
        _replace(FullyShardedDataParallel, "optim_state_dict", of_optimizer),
        _replace(FullyShardedDataParallel, "optim_state_dict_to_load", to_load),
        _states_in_own_memory(),
    )


def _states_in_own_memory() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import fsdp1_state

    try:
        return _around(private.UNFLATTEN_STATES, fsdp1_state.in_own_memory)
    except MissingNameError as error:  # training goes on
        around = _raising(error, _always)
        replacement = staticmethod(around(FullyShardedDataParallel.optim_state_dict))
        return _replace(FullyShardedDataParallel, "optim_state_dict", replacement)


def tensor_rank_parts() -> Undo:
    from smddp.sagemaker.distributed.checkpoint import tensor_rank_parts

    # Scripts have bound the names of the public functions already; these are what they call.
    private.LOAD_STATE_DICT.get()
    return _all(
        _around(private.SAVE_STATE_DICT, tensor_rank_parts.saving),
        _around(private.LOAD_STATE_DICT, tensor_rank_parts.loading),
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
    from smddp.sagemaker.fsdp.grad_scaler import agreed

    private.UNSCALE_SHARDED.get()
    return _all(_around(private.UNSCALE, agreed), _around(private.UNSCALE_SHARDED, agreed))


def adapters() -> Undo:
    from torch.nn.modules.module import register_module_module_registration_hook

    from smddp.sagemaker.tensor_parallel import adapter_hooks

    # The type annotation omits that a hook may return a replacement module.
    return register_module_module_registration_hook(adapter_hooks.on_registration).remove  # type: ignore[arg-type]


def client_change(kind: str, listing: str) -> Callable[[Any], Undo]:
    """Returns the change of a client's module.

    Args:
        kind: the client's class. A missing private name makes its constructor raise.
        listing: the function of `tensor_parallel.accelerate` that lists the replacements.
    """
    from smddp.sagemaker.tensor_parallel import accelerate

    def change(module: Any) -> Undo:
        try:
            replacements = list(getattr(accelerate, listing)(module))
        except MissingNameError as error:
            client = getattr(module, kind)
            return _replace(client, "__init__", _raising(error, _always)(client.__init__))
        return _all(*(_replace(*each) for each in replacements))

    return change


def _clients(of_accelerate: str, of_trainer: str) -> Undo:
    return _all(
        after_import("accelerate.accelerator", client_change("Accelerator", of_accelerate)),
        after_import("transformers.trainer", client_change("Trainer", of_trainer)),
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
    from smddp.sagemaker.fsdp import idle_experts

    return in_place.wrap(_fully_shard(), idle_experts.around_fully_shard)


def spread_experts() -> Undo:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from smddp.sagemaker.fsdp import spread_experts

    return _all(
        in_place.wrap(_fully_shard(), spread_experts.around_fully_shard),
        _replace(FullyShardedDataParallel, "__init__", spread_experts.around_fsdp1(FullyShardedDataParallel.__init__)),
    )
