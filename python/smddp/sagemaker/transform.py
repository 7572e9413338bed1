"""`tsm.transform()`: shares a model's layers among the ranks of a tensor group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker import hf
from smddp.sagemaker.context_parallel import forward as context_parallel
from smddp.sagemaker.expert_parallel.spread import Spreader
from smddp.sagemaker.moe.moe_config import MoEConfig
from smddp.sagemaker.replaced import recorded
from smddp.sagemaker.rng import TENSOR_PARALLEL, get_rng_state_tracker, share_default_state
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel import adapters, plan_entries, sequence, share
from smddp.sagemaker.tensor_parallel import layers as layers_from
from smddp.sagemaker.tensor_parallel.by_head import refuse_by_head
from smddp.sagemaker.tensor_parallel.input_check import Agreement
from smddp.sagemaker.tensor_parallel.loading import accept_whole_values
from smddp.sagemaker.tensor_parallel.modules import READ_LOCAL
from smddp.sagemaker.tensor_parallel.plan import Planner
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.replicated import hold_whole, refuse_embeddings
from smddp.sagemaker.tensor_parallel.shards import put
from smddp.sagemaker.tensor_parallel.transformer import TransformerLMHead, mark

log = logging.getLogger("smddp.sagemaker")

_OPTIONS = ("tp_plan", "sequence_parallel", "layers", "moe")


@recorded
def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | Any | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Share each layer of ``model`` among the ranks of a tensor group, in place; wrap the result with FSDP.

    Collective over the tensor group; if its ranks hold different values, the first rank's values are used. The model's
    plan selects the sharding; with tensor_parallel_degree 1 layers are only marked. Afterwards decoder layers are
    instances of `tensor_parallel.transformer.TETransformerLayer` and of their original class. Sharded parameters are
    DTensors over ``tsm.state.mesh["tensor"]``, and all others are replicated. A layer costs two all-reduces forward and
    two backward. It costs more if the plan gathers inside blocks (Phi-3, OLMo 2) or reduces each expert separately
    (transformers 4.57 except Mixtral). A shared embedding or head adds one in each direction.

    A plan for any module is a dict from module names, where `*` stands for one component, to styles
    (`tensor_parallel/styles.py`) or torch's `ParallelStyle` objects:

        >>> transform(model, config={"tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}})

    or the attribute `_tp_plan` of the model or of modules in it.

    Args:
        model: a transformers model, or any module with a plan. If any parameter is on the meta device, the whole
            result is on meta, and ``device`` is ignored.
        device: device of the result; the mesh's device by default.
        dtype: of the floating-point parameters; unchanged by default. Buffers keep their dtype.
        config: None; or a dict with any of "tp_plan" (above), "sequence_parallel" (bool: activations between
            blocks are shards of the sequence, which must divide by the degree) and "layers" ("plain" or
            "transformer_engine", see `tensor_parallel/layers.py`) and "moe" (a `MoEConfig`, for a model with experts);
            or a `MoEConfig` alone.
        load_state_dict_from_rank0: use rank 0's parameters, distributed to its tensor group, see `rank0.load`; other
            ranks' values are ignored and may be on meta.
        cp_comm_type: with context_parallel_degree > 1, transfer of other ranks' keys and values: "p2p" (ring,
            overlapped with attention; memory for two ranks) or "all_gather" (all at once, before attention).

    Returns:
        ``model``.

    Raises:
        RuntimeError: before `tsm.init()`; transformer_engine without a GPU (ImportError without the package).
        TypeError: arguments of the wrong type.
        ValueError: a model without a plan, already transformed or wrapped by FSDP; sizes that the degree does not
            divide; an unknown style or cp_comm_type; a model whose attention cannot be split. With experts: degrees
            that do not divide them, an unsupported family, expert_parallel_degree above 1 without a `MoEConfig`.
        NotImplementedError: an unsupported model or option.
    """
    inside = adapters.whole_model(model)
    if inside is not model:
        if state.tp_size > 1:
            adapters.refuse_outside(model, inside)
        transform(inside, device, dtype, config, load_state_dict_from_rank0, cp_comm_type)
        return model
    options = _checked(model, config, cp_comm_type)
    if load_state_dict_from_rank0 and state.ep_size > 1:
        raise NotImplementedError(
            f"load_state_dict_from_rank0 with expert_parallel_degree={state.ep_size}: rank 0 does not hold all "
            "experts; transform and wrap the model, then read files with distributed.checkpoint.hf.load_pretrained"
        )
    assert state.mesh is not None  # else `_checked` has raised
    tp = TensorGroup(state.mesh["tensor"])
    source = _source(model) if load_state_dict_from_rank0 else None
    moe = options.get("moe")
    experts = Spreader(model, moe) if moe is not None and moe.smp_moe else None
    context_parallel.split(model, cp_comm_type)
    if tp.size > 1:  # one rank has nothing to share, whatever the options
        _share(model, tp, options, experts, same=not load_state_dict_from_rank0)
    else:
        if experts is not None:
            experts.apply()
            accept_whole_values(model)
        mark(model, plan_entries.layers_of(model, _plan(model, options)[0]))
    _move(model, device, dtype)
    if load_state_dict_from_rank0:
        from smddp.sagemaker import rank0

        # `source` is rank 0's whole state dict in Hugging Face form, None elsewhere. `load` translates it
        # (state_dict.translate_hf_state_dict), cuts each tensor as the model's DTensor of that name is cut, and
        # sends it to the ranks of rank 0's tensor group, whose parameters become real on ``device``. Other
        # groups get theirs from FSDP (sync_module_states).
        rank0.load(model, source, device=device)
    return model


def _checked(model: nn.Module, config: Any, cp_comm_type: str) -> dict[str, Any]:
    """Returns the options in ``config``; raises for all errors that do not depend on the model's plan."""
    if state.mesh is None:
        raise RuntimeError("transform() needs the mesh that tsm.init() makes: call tsm.init() first")
    if not isinstance(model, nn.Module):
        raise TypeError(f"transform() takes a torch.nn.Module, got {type(model).__name__}")
    _refuse_wrapped(model)
    if isinstance(model, TransformerLMHead):
        raise ValueError(f"this {type(model).__name__} is transformed already: call transform() once")
    context_parallel.check(model, cp_comm_type)
    return _options(config)


def _refuse_wrapped(model: nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel | FSDPModule):
            raise ValueError(
                f"transform() after FSDP: {name or 'the model'} is wrapped already; transform first, then wrap the "
                "result"
            )


def _options(config: Any) -> dict[str, Any]:
    if isinstance(config, MoEConfig):
        config = {"moe": config}
    if not isinstance(config, Mapping | None):
        raise TypeError(f"config: expected a dict, a MoEConfig or None, got {type(config).__name__}")
    config = config or {}
    _check_moe(config.get("moe"))
    for key in config:
        if key not in _OPTIONS:
            raise ValueError(f"config: unknown key {key!r}; known: {', '.join(_OPTIONS)}")
    layers = config.get("layers", "plain")
    if layers not in ("plain", "transformer_engine"):
        raise ValueError(f'config: layers={layers!r} must be "plain" or "transformer_engine"')
    if not isinstance(config.get("sequence_parallel", False), bool):
        raise TypeError(f"config: sequence_parallel must be a bool, got {config['sequence_parallel']!r}")
    return dict(config)


def _check_moe(moe: Any) -> None:
    if moe is not None and not isinstance(moe, MoEConfig):
        raise TypeError(f'config: "moe" must be a MoEConfig, got {type(moe).__name__}')
    degree = state.expert_parallel_degree
    if degree > 1 and (moe is None or not moe.smp_moe):
        given = "there is none" if moe is None else "it has smp_moe=False"
        raise ValueError(
            f"expert_parallel_degree={degree} takes a MoEConfig, and {given}: transform(model, config=MoEConfig(...)), "
            "or set the degree to 1"
        )


def _plan(model: nn.Module, options: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """(the plan, whether the caller wrote it)."""
    if "tp_plan" in options:
        return dict(options["tp_plan"]), True
    return hf.plan_of(model), not any(map(hf.is_pretrained, model.modules()))


def _share(model: nn.Module, tp: TensorGroup, options: Mapping[str, Any], experts: Spreader | None, same: bool) -> None:
    plan, strict = _plan(model, options)
    entries = plan_entries.expand(model, plan, strict)
    if experts is not None:
        entries = experts.without_experts(entries)
    if not entries:
        raise ValueError(
            f"{type(model).__name__} carries no plan for tensor parallelism. Give one: transform(model, "
            'config={"tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}), or as its attribute _tp_plan'
        )
    layers = plan_entries.layers_of(model, plan)
    if hf.is_pretrained(model) and not plan_entries.reach(model, entries, layers):
        raise ValueError(
            f"the plan of {type(model).__name__} shares nothing in its layers, only {', '.join(sorted(entries))}: give "
            'one for them, config={"tp_plan": {...}}, or set tensor_parallel_degree=1'
        )
    hf.refuse_variant(model)
    refuse_embeddings(model)
    in_sequence = options.get("sequence_parallel", False)
    if in_sequence:
        sequence.check(model)
    chosen = layers_from.provider(options.get("layers", "plain"))
    tied = share.tied(model)
    planner = Planner(model, tp, state.random_seed, in_sequence)
    styles = planner.styles(planner.with_tied(entries, tied))
    if same:
        _warn_of_differences(share.broadcast_if_different(model, tp), tp)
    planner.emit_warnings()
    if experts is not None:
        experts.apply()
    modules = share.cut(model, tp, planner, styles, tied)
    if in_sequence:
        sequence.apply(layers, planner.blocks, modules, state.random_seed)
    _warn_of_small_share(model, tp)
    hold_whole(model, tp, READ_LOCAL)
    accept_whole_values(model)
    refuse_by_head(model, planner.heads.of)
    layers_from.use(model, chosen)
    _seed_tracker()
    share_default_state(tp.group, torch.device(tp.mesh.device_type))
    mark(model, layers)
    Agreement(tp, state.config["tensor_parallel_checks"]).attach(model)


def _warn_of_small_share(model: nn.Module, tp: TensorGroup) -> None:
    """Warn if a plan shards less than half of the parameters: every rank then stores and computes nearly all."""
    parameters = list(model.parameters())
    everything = sum(p.numel() for p in parameters)  # a DTensor's number is the whole one's
    shared = sum(p.numel() for p in parameters if isinstance(p, DTensor))
    if 2 * shared < everything:
        log.warning(
            "the plan of %s shares %.0f %% of its parameters among the %d ranks of a tensor group, which all hold, and "
            "compute, the rest: a plan for more of it is config={'tp_plan': {...}}",
            type(model).__name__,
            100 * shared / everything,
            tp.size,
        )


def _warn_of_differences(differed: list[str], tp: TensorGroup) -> None:
    if differed:
        log.warning(
            "%d parameters differed within a tensor group of %d ranks (%s, ...), as after making the model without a "
            "common seed; all its ranks have the first one's values now",
            len(differed),
            tp.size,
            differed[0],
        )


def _seed_tracker() -> None:
    tracker = get_rng_state_tracker()
    tracker.reset()
    tracker.add(TENSOR_PARALLEL, state.random_seed + state.tp_rank)


def _source(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns rank 0's state dict before sharding; None on other ranks. Raises ValueError on every rank."""
    source, error = None, [""]
    if dist.get_rank() == 0:
        source = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        on_meta = [name for name, tensor in source.items() if tensor.is_meta]
        if on_meta:
            error = [f"load_state_dict_from_rank0: rank 0 must hold real parameters, but {on_meta[0]} is on meta"]
    dist.broadcast_object_list(error, src=0)
    if error[0]:
        raise ValueError(error[0])
    return source


def _move(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        target = torch.device("meta")
    elif device is not None:
        target = torch.device(device)
    else:
        assert state.mesh is not None  # else `_checked` has raised
        target = torch.device(state.mesh.device_type)
    moved: dict[int, nn.Parameter | None] = {}  # preserves shared parameters
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) in moved:
                module._parameters[name] = moved[id(parameter)]
                continue
            to = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            if parameter.device != target or parameter.dtype != to:
                put(module, name, parameter.detach().to(device=target, dtype=to), parameter)
            moved[id(parameter)] = module._parameters[name]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(target)
