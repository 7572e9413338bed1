"""Loading on rank 0 and distribution to other ranks, for `transform(load_state_dict_from_rank0=True)`.

Rank 0 holds the model's values, the other ranks have the model on meta. `load` gives rank 0's tensor group its shards:
afterwards the ranks of the first copy's first shard, one for each tensor rank, have real parameters. From there:

- FSDP1 on GPUs spreads them: ``FSDP(..., sync_module_states=True)``, with a `DelayedParamIniter` of ranks on meta.
- FSDP2 shards real parameters at once and would lose them, so they go aside first:

      model = tsm.transform(model, load_state_dict_from_rank0=True)
      values = rank0.take(model)            # the model is on meta everywhere
      fully_shard(model)
      rank0.spread(model, values)           # each rank has its shard

- FSDP1 on CPUs, where torch has no sync_module_states, and no FSDP at all: ``rank0.spread(model)`` before wrapping.
  Every rank then holds all that its tensor rank holds.

All send one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from smddp.sagemaker import dtensor_shards
from smddp.sagemaker.names import plain_name, some
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel.state_dict import translate_hf_state_dict

_TENSOR = ("tensor",)


@torch.no_grad()
def load(
    model: nn.Module, source: Mapping[str, torch.Tensor] | None, device: torch.device | str | None = None
) -> nn.Module:
    """Give rank 0's tensor group its shards of rank 0's values. Collective over all ranks.

    Args:
        model: transformed, or of one tensor rank; not wrapped by FSDP. Parameters and buffers on meta are allocated on
            the ranks of rank 0's tensor group and remain on meta on other ranks.
        source: on rank 0 the full state dict with Hugging Face's names and layouts; None on other ranks.
        device: device of the allocated parameters; the mesh's device type by default.

    Returns:
        ``model``.

    Raises:
        ValueError: on every rank: names or shapes in ``source`` that are not the model's, or values on meta.
        RuntimeError: before ``init()``.
    """
    device = _device(device)
    _agree(_mismatch(model, source) if dist.get_rank() == 0 else "")
    if state.rep_rank or state.shard_rank:
        return model
    assert state.mesh is not None  # else `_device` has raised
    group = state.mesh.get_group("tensor")

    def send(full: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return _broadcast(full, shape, dtype, device, [(group, 0)])

    by_name = _by_stored_name(model, source) if source is not None and dist.get_rank() == 0 else {}
    for names, parameter, holders in _parameters(model):
        value = next((by_name[name]() for name in names if name in by_name), None)
        full = send(value, parameter.shape, parameter.dtype)
        _set(holders, dtensor_shards.cut(full, parameter) if isinstance(parameter, DTensor) else full)
    for (prefix, tensors), name, tensor in _others(model):
        value = by_name[prefix + name]() if prefix + name in by_name else tensor
        tensors[name] = send(value if dist.get_rank() == 0 else None, tensor.shape, tensor.dtype)
    return model


def take(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Detach the values that `load` set on this rank, and move the model to meta; None on ranks without values.

    What this rank holds of each parameter and buffer, by name, stays where it is in memory.
    """
    if flat := _flat(model):
        raise ValueError(flat)
    mine = state.rep_rank == 0 and state.shard_rank == 0
    values: dict[str, torch.Tensor] = {}
    for (name, *_), parameter, holders in _parameters(model):
        values[name] = dtensor_shards.held(parameter)
        empty = torch.empty_like(values[name], device="meta")
        if isinstance(parameter, DTensor):
            empty = dtensor_shards.around(empty, parameter)
        new = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        vars(new).update(vars(parameter))
        for module, attribute in holders:
            module._parameters[attribute] = new
    for (prefix, tensors), name, tensor in _others(model):
        values[prefix + name] = tensor
        tensors[name] = torch.empty_like(tensor, device="meta")
    return values if mine else None


@torch.no_grad()
def spread(
    model: nn.Module, values: Mapping[str, torch.Tensor] | None = None, device: torch.device | str | None = None
) -> nn.Module:
    """Broadcast the values of rank 0's tensor group to all ranks of the same tensor rank. Collective over all ranks.

    Args:
        model: under ``fully_shard``, or under nothing. Each rank keeps what its layout says.
        values: what `take` returned, before ``fully_shard``. Without it the model's own values are sent, which are
            whole only without ``fully_shard``.
        device: where tensors on meta become real; the mesh's device type by default.

    Returns:
        ``model``, with nothing left on meta.

    Raises:
        ValueError: on every rank: values that are missing or on meta, a model under FSDP1.
    """
    device = _device(device)
    source = state.rep_rank == 0 and state.shard_rank == 0
    _agree(_unspreadable(model, values) if source else _flat(model))
    mesh = state.mesh
    assert mesh is not None  # else `_device` has raised
    # First the first shard of every copy, then everyone in each copy.
    route = []
    if state.shard_rank == 0:
        route.append((mesh.get_group("replicate"), 0))
    route.append((mesh.get_group("shard"), 0))

    def value_of(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if not source:
            return None
        value = values[name] if values is not None else tensor.detach()
        return value.to_local() if isinstance(value, DTensor) else value

    for (name, *_), parameter, holders in _parameters(model):
        layout = parameter if isinstance(parameter, DTensor) else None
        meta = torch.empty(parameter.shape, device="meta")
        shape = dtensor_shards.cut_over(meta, layout, _TENSOR).shape if layout is not None else parameter.shape
        whole = _broadcast(value_of(name, parameter), shape, parameter.dtype, device, route)
        _set(holders, dtensor_shards.cut_rest(whole, layout, _TENSOR) if layout is not None else whole)
    for (prefix, tensors), name, tensor in _others(model):
        tensors[name] = _broadcast(value_of(prefix + name, tensor), tensor.shape, tensor.dtype, device, route)
    return model


def _parameters(model: nn.Module) -> list[tuple[list[str], nn.Parameter, list[tuple[nn.Module, str]]]]:
    """(names, parameter, the modules and attributes that hold it), each parameter once, in the model's order."""
    found: dict[int, tuple[list[str], nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                names, _, holders = found.setdefault(id(parameter), ([], parameter, []))
                names.append(plain_name(f"{prefix}.{attribute}"))
                holders.append((module, attribute))
    return list(found.values())


def _others(model: nn.Module) -> list[tuple[tuple[str, dict[str, Any]], str, torch.Tensor]]:
    """((module's prefix, dict that holds it), name, tensor) of buffers and of tensors kept as plain attributes."""
    found = []
    for prefix, module in model.named_modules():
        prefix = plain_name(f"{prefix}.")
        for tensors in (module._buffers, vars(module)):
            found += [((prefix, tensors), n, t) for n, t in tensors.items() if isinstance(t, torch.Tensor)]
    return found


def _set(holders: list[tuple[nn.Module, str]], value: torch.Tensor) -> None:
    module, attribute = holders[0]
    held = module._parameters[attribute]
    assert held is not None  # `_parameters` lists no other
    parameter = dtensor_shards.put(value, held)
    for module, attribute in holders:
        module._parameters[attribute] = parameter


def _broadcast(
    value: torch.Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    route: list[tuple[dist.ProcessGroup, int]],
) -> torch.Tensor:
    """``value``, given on the first group's source, on every rank of the route's groups, which follow each other."""
    if value is None:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    else:
        tensor = value.to(device, dtype).contiguous()
    # Not every backend sends truth values.
    sent = tensor.view(torch.uint8) if dtype == torch.bool else tensor
    for group, source in route:
        if group.size() > 1:
            dist.broadcast(sent, dist.get_global_rank(group, source), group=group)
    return tensor


def _by_stored_name(model: nn.Module, source: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    """For each name in the transformed model, what makes its whole value from the one tensor of ``source``."""

    def make(theirs: str, ours: str) -> Callable[[], torch.Tensor]:
        return lambda: translate_hf_state_dict(model, {theirs: source[theirs]})[ours]

    return {ours: make(theirs, ours) for ours, (theirs, _) in _stored(model, source).items()}


def _stored(model: nn.Module, source: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Size]]:
    """{name in the transformed model: (name in ``source``, whole shape)}."""
    found = {}
    for theirs, tensor in source.items():
        for ours, meta in translate_hf_state_dict(model, {theirs: torch.empty_like(tensor, device="meta")}).items():
            found[ours] = (theirs, meta.shape)
    return found


def _mismatch(model: nn.Module, source: Mapping[str, torch.Tensor] | None) -> str:
    """Returns the error in rank 0's values for this model; "" if none."""
    if source is None:
        return "rank 0 passed no state dict: it is the rank that holds the values"
    if flat := _flat(model):
        return flat
    on_meta = [name for name, tensor in source.items() if tensor.is_meta]
    if on_meta:
        return f"rank 0 must hold real values, but {some(on_meta)} are on meta"
    known = {plain_name(name): tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: shape for name, (_, shape) in _stored(model, source).items()}
    missing = [names[0] for names, _, _ in _parameters(model) if not any(name in given for name in names)]
    if missing:
        return f"rank 0's state dict lacks {some(missing)}"
    extra = [name for name in given if name not in known]
    if extra:
        return f"rank 0's state dict has {some(extra)}, which the model has not"
    wrong = [f"{n} {tuple(shape)}, not {tuple(known[n])}" for n, shape in given.items() if shape != known[n]]
    return f"rank 0's state dict has other shapes than the model: {some(wrong)}" if wrong else ""


def _unspreadable(model: nn.Module, values: Mapping[str, torch.Tensor] | None) -> str:
    """Returns the error on a sending rank; "" if none."""
    if flat := _flat(model):
        return flat
    everything: dict[str, torch.Tensor] = {names[0]: parameter for names, parameter, _ in _parameters(model)}
    everything |= {prefix + name: tensor for (prefix, _), name, tensor in _others(model)}
    if values is not None:
        missing = [name for name in everything if name not in values]
        return f"the values that take() returned lack {some(missing)}" if missing else ""
    if any(isinstance(p, DTensor) and "shard" in (p.device_mesh.mesh_dim_names or ()) for p in everything.values()):
        return "under fully_shard no rank holds whole values: take() them before it, and pass them to spread()"
    on_meta = [name for name, tensor in everything.items() if tensor.is_meta]
    return f"rank {dist.get_rank()} is to send {some(on_meta)}, which are on meta: load() first" if on_meta else ""


def _flat(model: nn.Module) -> str:
    if state.ep_size > 1:
        return "with expert_parallel_degree > 1 rank 0 does not hold all experts: load_pretrained loads into any layout"
    if FullyShardedDataParallel.fsdp_modules(model):
        return "FSDP1 has flattened the parameters: load before wrapping, or use its sync_module_states=True"
    return ""


def _agree(problem: str) -> None:
    """Raise the error of any rank on every rank."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    if any(found):
        raise ValueError(next(text for text in found if text))


def _device(device: torch.device | str | None) -> torch.device:
    if state.mesh is None:
        raise RuntimeError("loading from rank 0 needs the mesh that tsm.init() makes: call tsm.init() first")
    device = torch.device(state.mesh.device_type if device is None else device)
    if device.type == "meta":
        raise ValueError("device is where the values go: it cannot be meta")
    return device
