"""Corrections of FSDP1's sharded state dicts on SMP's mesh. Training does not need them.

If FSDP1's mesh is part of a larger mesh, torch assumes FSDP shards over the larger mesh's first dimension. SMP's
first dimension is the replicate dimension: each replica's ranks would hold only a part of the model, and a checkpoint
of the first replica would have gaps.

When torch loads the optimizer state of tensor-parallel parameters, every tensor rank gets the first rank's part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard

from smddp.sagemaker.dtensor_shards import around, held
from smddp.sagemaker.names import plain_name
from smddp.sagemaker.parallel import DIMENSIONS
from smddp.sagemaker.private_names import handle_of
from smddp.sagemaker.state_handler import state

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def chunk_dtensor(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`DTensorExtensions.chunk_dtensor` that cuts along the dimension FSDP shards over."""

    @functools.wraps(original)
    def replacement(self: Any, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> torch.Tensor:
        names = device_mesh.mesh_dim_names or ()
        if state.mesh is None or isinstance(tensor, DTensor) or not names or not set(names) <= set(DIMENSIONS):
            return original(self, tensor, rank, device_mesh)
        whole: list[Placement] = [Replicate()] * len(DIMENSIONS)
        cut = list(whole)
        cut[DIMENSIONS.index(names[-1])] = Shard(0)
        tensor = DTensor.from_local(tensor.detach().clone(), state.mesh, whole, run_check=False)
        return tensor.redistribute(state.mesh, cut)

    return replacement


def optim_state_dict_to_load(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`FullyShardedDataParallel.optim_state_dict_to_load` that gives each tensor rank its own part."""

    @functools.wraps(original)
    def replacement(
        model: nn.Module, optim: Any, optim_state_dict: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        specs = _tensor_parallel_specs(model)
        if specs and isinstance(optim_state_dict, dict) and "state" in optim_state_dict:
            parts = dict(optim_state_dict["state"])
            # This communicates, and not all ranks hold the dictionary in one order.
            for name in sorted(name for name in parts if name in specs):
                parts[name] = {key: _part(value, *specs[name]) for key, value in parts[name].items()}
            optim_state_dict = {**optim_state_dict, "state": parts}
        loaded = original(model, optim, optim_state_dict, *args, **kwargs)
        if specs:
            _like_parameters(loaded, model, optim)
        return loaded

    return replacement


def optim_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`FullyShardedDataParallel.optim_state_dict` of flat parameters by groups without global rank 0, too.

    Those ranks get the names of flat parameters from global rank 0, whatever the group is, as all have the same.
    """

    @functools.wraps(original)
    def replacement(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if "group" in kwargs and any(
            handle is not None and not handle._use_orig_params
            for handle in map(handle_of, FullyShardedDataParallel.fsdp_modules(model))
        ):
            kwargs["group"] = None
        return original(model, *args, **kwargs)

    return replacement


def in_own_memory(original: Callable[..., None]) -> Callable[..., None]:
    """torch's function behind `optim_state_dict` that unflattens one state of all parameters, with copies.

    torch gathers each state into the same buffer. Without a copy, on the CPU, each state has the values of the last.
    """

    @functools.wraps(original)
    def replacement(info: Any, states: dict[str, dict[str, Any]], name: str, *args: Any) -> None:
        gathered = {id(values): values.get(name) for values in states.values()}
        original(info, states, name, *args)
        for values in states.values():
            value, buffer = values.get(name), gathered[id(values)]
            if type(value) is type(buffer) is torch.Tensor:
                if value.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
                    values[name] = value.clone()

    return replacement


def either_order(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`optim_state_dict_to_load` of FSDP1 that takes (state, model, optimizer), as torch 2.0 did, too."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> dict[str, Any]:
        if len(args) >= 3 and isinstance(args[0], dict) and isinstance(args[1], nn.Module):
            loaded, model, optimizer, *rest = args
            args = (model, optimizer, loaded, *rest)
        return original(*args, **kwargs)

    return replacement


def _like_parameters(loaded: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Make plain moments DTensors where the parameters are: in units that FSDP1 copies, torch leaves them plain."""
    parameters: dict[Any, nn.Parameter] = dict(model.named_parameters())
    # Keyed by index in most optimizers, by name in others.
    parameters.update(enumerate(p for group in optim.param_groups for p in group["params"]))
    for key, values in loaded.get("state", {}).items():
        parameter = parameters.get(key)
        if isinstance(parameter, DTensor):
            for name, value in values.items():
                plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
                if plain and value.dim() > 0 and value.shape == held(parameter).shape:
                    values[name] = around(value, parameter)


def _tensor_parallel_specs(model: nn.Module) -> dict[str, tuple[Any, torch.Size]]:
    """Of each parameter that tensor parallelism has cut and FSDP1 has flattened: placement, and shape of the part."""
    found: dict[str, tuple[Any, torch.Size]] = {}
    for prefix, module in model.named_modules():
        handle = handle_of(module) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            flat = handle.flat_param
            for name, spec, shape in zip(flat._fqns, flat._param_extensions, flat._shapes):
                if hasattr(spec, "placements"):
                    found[plain_name(f"{prefix}.{name}")] = (spec.placements[0], shape)
    return found


def _part(value: Any, placement: Any, part: torch.Size) -> Any:
    """This tensor rank's part of ``value``, whole in all other dimensions."""
    if not isinstance(value, DTensor) or value.shape == part:
        return value
    mesh = value.device_mesh
    if (mesh.mesh_dim_names or ("",))[-1] != DIMENSIONS[-1]:
        return value
    return value.redistribute(mesh, [*[Replicate()] * (mesh.ndim - 1), placement]).to_local()
