"""State dict types of a model, and allocation of optimizer state for loading."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from smddp.sagemaker.distributed.checkpoint.interval import _Interval, compute_auto_checkpoint_interval
from smddp.sagemaker.distributed.checkpoint.layout import Cut, LocalStateDict, cuts
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.private_names import handle_of

__all__ = [
    "SMStateDictType",
    "_Interval",
    "compute_auto_checkpoint_interval",
    "init_optim_state",
    "load_local_state_dict",
    "local_state_dict",
    "sm_state_dict_type",
]

_EXTRA = "_extra_state"


class SMStateDictType(enum.Enum):
    """Forms of state dicts besides those of torch's `StateDictType`."""

    SM_LOCAL_STATE_DICT = "sm_local_state_dict"


@contextmanager
def sm_state_dict_type(
    model: nn.Module,
    state_dict_type: SMStateDictType | StateDictType,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Context manager that selects the type of ``model.state_dict()``.

    Under `SM_LOCAL_STATE_DICT` it holds this rank's own tensors and shares their memory: making it communicates
    nothing, and loading a checkpoint into it loads the model. Such a checkpoint fits only the shard and
    tensor-parallel degrees it was saved with; the number of replicas may change. The optimizer's part is its plain
    ``optimizer.state_dict()``. ``model.load_state_dict(local)`` copies into the model.

    Args:
        model: FSDP1, FSDP2, tensor-parallel or plain, and wrapped by activation checkpointing or not.
        state_dict_type: the local one, or one of FSDP1's, which is passed on to it.
        state_dict_config, optim_state_dict_config: for FSDP1's types.

    Raises:
        TypeError: no state dict type.
        ValueError: a configuration together with the local type.
    """
    if isinstance(state_dict_type, StateDictType):
        with FullyShardedDataParallel.state_dict_type(
            model, state_dict_type, state_dict_config, optim_state_dict_config
        ):
            yield
        return
    if state_dict_type is not SMStateDictType.SM_LOCAL_STATE_DICT:
        raise TypeError(
            "state_dict_type must be SMStateDictType.SM_LOCAL_STATE_DICT or a StateDictType of FSDP, got "
            f"{state_dict_type!r}"
        )
    if state_dict_config is not None or optim_state_dict_config is not None:
        raise ValueError("SM_LOCAL_STATE_DICT takes no configuration: it always shares the model's memory")
    replaced: dict[str, Callable[..., Any]] = {
        "state_dict": lambda *_, **__: local_state_dict(model),
        "load_state_dict": lambda local, strict=True, assign=False: load_local_state_dict(model, local),
    }
    before = {name: model.__dict__[name] for name in replaced if name in model.__dict__}
    model.__dict__.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del model.__dict__[name]
        model.__dict__.update(before)


def local_state_dict(model: nn.Module) -> LocalStateDict:
    """This rank's own tensors of ``model``, by clean names; FSDP1's flat parameters as they are. No communication."""
    local = LocalStateDict()
    shard = (1, 0)
    flat_ids: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        handle = handle_of(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is None:
            continue
        flat = handle.flat_param
        flat_ids |= {id(flat), *(id(p) for p in flat._params or ()), *(id(p) for p in flat._shared_params or ())}
        # Not .data: the root's may still be whole after a forward pass without a backward pass.
        local[plain_name(f"{prefix}.") + "_flat_param"] = getattr(flat, "_local_shard", flat).detach()
        shard = max(shard, (handle.world_size if handle.uses_sharded_strategy else 1, handle.rank))
    if shard[0] == 1:
        shard = (1, 0)
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {name: p for name, p in module._parameters.items() if id(p) not in flat_ids}
        kept |= {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in kept.items():
            if tensor is not None:
                if isinstance(tensor, DTensor):
                    shard = max(shard, _sharding(tensor))
                    tensor = tensor.to_local()
                local[plain_name(f"{prefix}.{name}")] = tensor.detach()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            local[plain_name(f"{prefix}.{_EXTRA}")] = module.get_extra_state()
    local.cut = Cut(*shard, *_other_dimensions())
    return local


def load_local_state_dict(model: nn.Module, local: dict[str, Any]) -> None:
    """Copies ``local``, made by `local_state_dict`, into ``model``.

    Raises:
        ValueError: names or shapes that are not those of this rank's part of the model.
    """
    mine = local_state_dict(model)
    if mine.keys() != local.keys():
        raise ValueError(
            f"not this model's local state dict: missing {sorted(mine.keys() - local.keys())}, unexpected "
            f"{sorted(local.keys() - mine.keys())}"
        )
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor) and tensor.shape != local[name].shape:
            raise ValueError(
                f"{name}: this rank holds {tuple(tensor.shape)}, the local state dict {tuple(local[name].shape)}; "
                "a local state dict fits only the degrees it was made with"
            )
    for name, tensor in mine.items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(local[name])
    for prefix, module in model.named_modules(remove_duplicate=False):
        name = plain_name(f"{prefix}.{_EXTRA}")
        if name in local:
            module.set_extra_state(local[name])


def _sharding(tensor: DTensor) -> tuple[int, int]:
    """Returns FSDP2's shard degree and this rank's index; (1, 0) for a tensor that FSDP2 does not shard."""
    names = tensor.device_mesh.mesh_dim_names or ()
    for dimension, place in enumerate(tensor.placements):
        if cuts(place) and not (len(names) > dimension and names[dimension].startswith(("t", "expert"))):
            return tensor.device_mesh.size(dimension), tensor.device_mesh.get_local_rank(dimension)
    return 1, 0


def _other_dimensions() -> tuple[int, int, int, int]:
    from smddp.sagemaker.state_handler import state

    return (state.tp_size, state.tp_rank, state.ep_size, state.ep_rank) if state.is_initialized else (1, 0, 1, 0)


def init_optim_state(opt: torch.optim.Optimizer, skip_empty_param: bool = False) -> None:
    """Allocates the optimizer's state with zeros, as a target for loading. Parameters keep their values.

    Args:
        opt: an optimizer; nothing happens if it has state already.
        skip_empty_param: make none for parameters of which this rank holds nothing, as a real step under FSDP does.

    Raises:
        RuntimeError: a parameter has a gradient, which this would lose.
    """
    if opt.state:
        return
    parameters = [p for group in opt.param_groups for p in group["params"]]
    if any(p.grad is not None for p in parameters):
        raise RuntimeError("init_optim_state takes a step with zero gradients: call optimizer.zero_grad() first")
    rates = [group.get("lr") for group in opt.param_groups]
    try:
        for parameter in parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad and not (skip_empty_param and local.numel() == 0):
                parameter.grad = torch.zeros_like(parameter)
        for group in opt.param_groups:
            # A learning rate of zero keeps parameters unchanged, also with weight decay.
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        opt.step()
    finally:
        for group, rate in zip(opt.param_groups, rates):
            if rate is not None:
                group["lr"] = rate
        opt.zero_grad(set_to_none=True)
