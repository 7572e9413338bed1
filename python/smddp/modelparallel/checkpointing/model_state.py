"""Conversion between the model's state dict and the stages' parts, with the names and shapes of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from smddp.formats import exact
from smddp.modelparallel import delayed
from smddp.modelparallel.checkpointing import sharded_state
from smddp.modelparallel.checkpointing import tensor_shards as of_tensors
from smddp.modelparallel.checkpointing.optimizer_state import IS_PARTIAL
from smddp.modelparallel.data_parallel import sharded
from smddp.modelparallel.state import state

# The class of what torch's `load_state_dict` returns.
_Keys: Any = type(nn.Module().load_state_dict({}))
# Metadata keys of a partial state, in addition to the module's names.
_MARKS = (IS_PARTIAL, sharded_state.SHARD, of_tensors.SPLITS)


def _cut(model: Any) -> bool:
    """Return True if the stages hold different parts of ``model``."""
    return (
        model.partitioned
        and not getattr(model, "gathered", False)
        and state.ranks is not None
        and state.ranks.pp_size > 1
    )


def _stage_of(model: Any, name: str, parameters: set[str]) -> int | None:
    """Return the stage of a parameter or buffer; None for a buffer outside of all parts, which each stage has."""
    if name in parameters:
        return model.stage_of_parameter(name)
    module = name
    while module and module not in model.where:
        module = module.rpartition(".")[0]
    return model.where.get(module)


def stages(model: Any) -> dict[str, int | None]:
    """Return the stage of everything in the module's state dict, by name."""
    module: nn.Module = model.get_module()
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: _stage_of(model, name, parameters) for name in module.state_dict()}


def local(model: Any) -> dict[str, Any]:
    """Return this stage's part of the state; the whole state if there is one stage.

    Raises RuntimeError before the cut of the model.
    """
    _, ranks = state.made("DistributedModel.local_state_dict()")
    if getattr(model, "gathered", False):
        raise RuntimeError("local_state_dict() after model.cpu(): every rank holds the whole model; use state_dict()")
    everything = model.get_module().state_dict()
    if ranks.pp_size == 1:
        splits = of_tensors.by_name(model.get_module())
        if (shared := sharded.of(model)) is not None:
            everything = sharded_state.local_model(everything, shared.rank, shared.degree)
            return {**everything, **of_tensors.encode(splits)}
        return {**everything, IS_PARTIAL: ranks.tp_size > 1, **of_tensors.encode(splits)}
    if not model.partitioned:
        raise RuntimeError("local_state_dict(): the first step cuts the model, and no stage has a part before")
    here = held(model)
    splits = {name: split for name, split in of_tensors.by_name(model.get_module()).items() if name in here}
    own = {name: value for name, value in everything.items() if name in here}
    return {**own, IS_PARTIAL: True, **of_tensors.encode(splits)}


@exact()
def whole(model: Any) -> dict[str, Any]:
    """Return the whole model's state on every stage. Collective over the pipeline once the model is cut, and over
    tensor groups.

    Tensors of other stages are transferred one at a time and stored on the CPU.
    """
    everything = model.get_module().state_dict()
    if getattr(model, "gathered", False):
        return dict(everything)
    splits = of_tensors.by_name(model.get_module())
    if sharded.of(model) is not None:
        return sharded_state.whole_model(everything, _first_names(model.get_module()), splits)
    if not _cut(model):
        if delayed.pending(model.get_module()):
            raise RuntimeError(
                "state_dict(): under smp.delay_param_initialization() parameters get their values at the first step"
            )
        return _joined(model, everything, splits)
    ranks = state.ranks
    assert ranks is not None  # as the model is cut
    own = {name: everything[name] for name in held(model)}
    about: list[Any] = [None] * ranks.pp_size
    local_state = {
        name: (splits[name].whole if name in splits else tuple(t.shape), t.dtype, t.device.type)
        for name, t in own.items()
        if isinstance(t, torch.Tensor)
    }
    dist.all_gather_object(about, local_state, group=ranks.pp_group)
    found: dict[str, Any] = {}
    first_name = _first_names(model.get_module())
    for name in everything:
        # A shared parameter is transferred once and remains one tensor.
        if (first := first_name.get(name, name)) in found:
            found[name] = found[first]
            continue
        stage = next((stage for stage, names in enumerate(about) if name in names), None)
        if stage is None:
            found[name] = everything[name]
            continue
        shape, dtype, device_type = about[stage][name]
        if stage == ranks.pp_rank:
            tensor = splits[name].gathered(own[name]) if name in splits else own[name].detach().contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device_type)
        dist.broadcast(tensor, src=ranks.pp_ranks[stage], group=ranks.pp_group)
        found[name] = tensor.cpu()
    return found


def _joined(model: Any, everything: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model that is not cut into stages, with whole tensors."""
    if not splits:
        return everything
    first_name = _first_names(model.get_module())
    found: dict[str, Any] = {}
    for name, value in everything.items():
        first = first_name.get(name, name)
        if first in found:
            found[name] = found[first]
        else:
            found[name] = splits[name].gathered(value) if name in splits else value
    return found


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter, by each of its names."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def load(model: Any, values: dict[str, Any], strict: bool = True) -> Any:
    """Load a whole state, or this stage's part of one; a part waits for the cut.

    A shared parameter may be there under one of its names. Returns torch's (missing, unexpected) names.

    Raises RuntimeError, if ``strict``, for names that are missing or unexpected.
    """
    partial = bool(values.get(IS_PARTIAL, False))
    if (shared := sharded.of(model)) is not None:
        sharded_state.check_place(values, shared.rank, shared.degree, "a model's state")
        return load_now(model, values, partial, strict)
    uncut = not model.partitioned and state.ranks is not None and state.ranks.pp_size > 1
    if uncut and (partial or delayed.pending(model.get_module())):
        model.register_post_partition_hook(lambda *_: load_now(model, values, partial, strict))
        return _Keys([], [])
    return load_now(model, values, partial, strict)


def held(model: Any) -> set[str]:
    """Return the names of the module's state dict that this stage holds: all of them before the cut."""
    if not _cut(model):
        return set(model.get_module().state_dict())
    assert state.ranks is not None  # as the model is cut
    return {name for name, stage in stages(model).items() if stage in (state.ranks.pp_rank, None)}


def load_now(model: Any, values: dict[str, Any], partial: bool, strict: bool) -> Any:
    """Load at once, see `load`; ``partial``: entries of other stages may be missing."""
    module: nn.Module = model.get_module()
    if state.ranks is not None:
        of_tensors.check_place(values, state.ranks.tp_rank, state.ranks.tp_size, "a model's state")
    pieces = values.get(sharded_state.SHARD, {}).get("names", ())
    values = {name: value for name, value in values.items() if name not in _MARKS}
    names, here = list(module.state_dict()), held(model)
    first = _first_names(module)
    given = {first.get(name, name) for name in values}
    missing = [name for name in names if (not partial or name in here) and first.get(name, name) not in given]
    unexpected = sorted(values.keys() - set(names))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the loaded state does not fit the model {type(module).__name__}: missing {_some(missing)}; unexpected "
            f"{_some(unexpected)}"
        )
    splits = {} if getattr(model, "gathered", False) else of_tensors.by_name(module)
    values = {name: splits[name].mine(value) if name in splits else value for name, value in values.items()}
    if sharded.of(model) is not None:
        sharded_state.load_model(module, values, values.keys() & here, pieces)
    else:
        module.load_state_dict({name: value for name, value in values.items() if name in here}, strict=False)
    if state.optimizer is not None:
        state.optimizer.refresh()
    return _Keys(missing, unexpected)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5]) or 'nothing'}{f' and {len(names) - 5} more' * (len(names) > 5)}"
