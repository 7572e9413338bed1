"""Private names of torch, transformers and Accelerate that this package uses; see `smddp.torch.private_names`."""

from __future__ import annotations

from typing import Any

import torch

from smddp.torch.private_names import MissingNameError, PrivateName

_FSDP1 = "FullyShardedDataParallel after torch.sagemaker.init(); use fully_shard instead"
_FSDP1_TENSOR = "FullyShardedDataParallel with tensor_parallel_degree > 1; use fully_shard instead"
_FLAT = "torch.distributed.fsdp._flat_param.FlatParamHandle."
_CHECKPOINT = "torch.distributed.checkpoint."
_CONTEXT = "context_parallel_degree > 1"
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel."
_CLIENTS = "Accelerator and Trainer with tensor_parallel_degree > 1"
_OFFLOADING = "sm_activation_offloading"
_OFFLOADING_OFF = "sm_activation_offloading has no effect, and offload_wrapper offloads by torch's own means"

CATCH_RESHARD = PrivateName("torch.distributed.fsdp._runtime_utils._catch_all_reshard", _FSDP1)
UNSHARDED_VIEWS = PrivateName(f"{_FLAT}_use_unsharded_views", _FSDP1_TENSOR)
SHARDED_GRAD_VIEWS = PrivateName(f"{_FLAT}_use_sharded_grad_views", _FSDP1_TENSOR)
UNSHARDED_GRAD_VIEWS = PrivateName(f"{_FLAT}_use_unsharded_grad_views", _FSDP1_TENSOR)
INIT_FLAT_PARAM = PrivateName(f"{_FLAT}_init_flat_param_and_metadata", _FSDP1_TENSOR)
WRITE_BACK = PrivateName(f"{_FLAT}_writeback_orig_params", _FSDP1_TENSOR)
UNFLATTEN_STATES = PrivateName(
    "torch.distributed.fsdp._optim_utils._unflatten_orig_param_states",
    "FullyShardedDataParallel.optim_state_dict after torch.sagemaker.init()",
)
LAZY_INIT = PrivateName(
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "fully_shard with tensor_parallel_degree > 1; use FullyShardedDataParallel instead",
)
SAVE_STATE_DICT = PrivateName(
    f"{_CHECKPOINT}state_dict_saver._save_state_dict",
    "torch.distributed.checkpoint with a process_group; use torch.sagemaker.distributed.checkpoint instead",
)
LOAD_STATE_DICT = PrivateName(f"{_CHECKPOINT}state_dict_loader._load_state_dict", SAVE_STATE_DICT.feature)
UNSCALE = PrivateName(
    "torch.amp.GradScaler._unscale_grads_", "loss scaling after torch.sagemaker.init(); use bfloat16 instead"
)
UNSCALE_SHARDED = PrivateName(
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler._unscale_grads_", UNSCALE.feature
)
SHARDED_TENSOR = PrivateName(
    "torch.distributed._shard.sharded_tensor.ShardedTensor", "FSDP1's sharded state dicts without a device mesh"
)
SHARD = PrivateName("torch.distributed._shard.sharded_tensor.Shard", SHARDED_TENSOR.feature)
FROM_SHARDS = PrivateName(f"{SHARDED_TENSOR.path}._init_from_local_shards_and_global_metadata", SHARDED_TENSOR.feature)
SHARDED_GROUP = PrivateName(f"{SHARDED_TENSOR.path}._process_group", SHARDED_TENSOR.feature)
CHECKPOINT_WRAPPER = PrivateName(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper", _OFFLOADING, _OFFLOADING_OFF
)
OFFLOAD_WRAPPER = PrivateName(
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.OffloadWrapper", _OFFLOADING, _OFFLOADING_OFF
)
WRAPPED = PrivateName(f"{OFFLOAD_WRAPPER.path}._checkpoint_wrapped_module", _OFFLOADING)
GRAPH_TASK = PrivateName("torch._C._current_graph_task_id", "activation offloading", _OFFLOADING_OFF)
STORAGE = PrivateName("torch.UntypedStorage._cdata", "delayed parameters and activation offloading")
DEFAULT_STORE = PrivateName("torch.distributed.distributed_c10d._get_default_store", "asynchronous checkpoints")
_CACHES_OFF = "after a second torch.sagemaker.init() in one process DTensor may use groups of the first"
DTENSOR_CACHE = PrivateName(
    "torch.distributed.tensor.DTensor._op_dispatcher", "torch.sagemaker.init() a second time", _CACHES_OFF
)
DTENSOR_FAST_CACHE = PrivateName(
    "torch._C._clear_DTensor_sharding_propagator_cache", DTENSOR_CACHE.feature, _CACHES_OFF
)
DISPATCH_MODE = PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "delayed parameters")
pytree = PrivateName("torch.utils._pytree", "experts in an nn.ModuleList under fully_shard")

SUPPORTS_BACKEND = PrivateName(f"{_PRETRAINED}_supports_attention_backend", _CONTEXT)
CAN_SET_ATTENTION = PrivateName(f"{_PRETRAINED}_can_set_attn_implementation", _CONTEXT)
ATTENTION = PrivateName(
    "transformers.configuration_utils.PretrainedConfig._attn_implementation",
    f"{_CONTEXT} and LlamaFlashAttention",
)
INIT_WEIGHTS = PrivateName(f"{_PRETRAINED}_init_weights", "delayed parameters of transformers models")
TIED_KEYS = PrivateName(f"{_PRETRAINED}_tied_weights_keys", "checkpoints of models with tied embeddings")
LAYER_CLASSES = PrivateName(
    f"{_PRETRAINED}_no_split_modules", "sequence parallelism", "decoder layers are not found by their class"
)

PREPARE_TP = PrivateName("accelerate.accelerator.Accelerator._prepare_tp", _CLIENTS)
PREPARE_ONE = PrivateName("accelerate.accelerator.Accelerator._prepare_one", _CLIENTS)
MODELS = PrivateName("accelerate.accelerator.Accelerator._models", _CLIENTS)
ITEMS_IN_BATCH = PrivateName("transformers.trainer.Trainer._get_num_items_in_batch", _CLIENTS)
SAVE_REST = PrivateName("transformers.trainer.Trainer._save", _CLIENTS)

# Attributes of FSDP1's handle and flat parameter; FSDP1 is no longer developed, so they are checked together.
OF_HANDLE = ("_use_orig_params", "_training_state", "_fsdp_extension", "_setattr_param", "_get_unflat_views")
OF_FLAT_PARAMETER = (
    "_params",
    "_shared_params",
    "_param_infos",
    "_shard_param_infos",
    "_param_extensions",
    "_fqns",
    "_shapes",
    "_is_grad_none_mask",
    "_fsdp_flattened",
)

# Its storages, which it has while parameters are gathered; layers compute on views of the padded ones.
FLAT_PARAMETER_DATA = ("_full_param_padded", "_full_prec_full_param_padded", "_local_shard", "_mp_shard")


def handle_of(unit: Any) -> Any:
    """Returns the handle of an FSDP1 unit, or None of a unit without parameters.

    Raises MissingNameError if this torch's FSDP1 lacks an attribute that smddp reads.
    """
    handle = PrivateName("torch.distributed.fsdp.FullyShardedDataParallel._handle", _FSDP1).of(unit)
    if handle is not None:
        for owner, path, names in (
            (handle, _FLAT, OF_HANDLE),
            (handle.flat_param, "torch.distributed.fsdp._flat_param.FlatParameter.", OF_FLAT_PARAMETER),
        ):
            for name in names:
                if not hasattr(owner, name):
                    raise PrivateName(path + name, _FSDP1).error()
    return handle


def is_flattened(parameter: torch.Tensor) -> bool:
    """Returns True for a flat parameter of FSDP1, and for a parameter that is part of one."""
    return getattr(parameter, "_fsdp_flattened", False)


def mark_flattened(parameter: torch.Tensor) -> None:
    """Marks a parameter so that FSDP1 does not flatten it again."""
    parameter._fsdp_flattened = True  # type: ignore[attr-defined]


def is_sharded_tensor(value: Any) -> bool:
    """Returns True for a ShardedTensor; without that class there is none."""
    kind = SHARDED_TENSOR.find()
    return kind is not None and isinstance(value, kind)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's storage, valid during the storage's lifetime (its address may change)."""
    return STORAGE.of(tensor.untyped_storage())


def in_backward() -> bool:
    """Returns True inside a backward pass of this thread."""
    return GRAPH_TASK.get()() != -1


def clear_dtensor_caches() -> None:
    """Clears DTensor's caches that are keyed by mesh."""
    dispatcher = DTENSOR_CACHE.find_or_warn()
    if dispatcher is not None:
        # torch 2.8 has no such cache.
        getattr(dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear", lambda: None)()
    # The cache of the fast path, which has statistics where it exists.
    if hasattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats"):
        clear = DTENSOR_FAST_CACHE.find_or_warn()
        if clear is not None:
            clear()


__all__ = ["MissingNameError", "PrivateName"]
