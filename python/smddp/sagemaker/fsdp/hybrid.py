"""Hybrid sharding: changes to FSDP1, FSDP2 and optimizers after `tsm.init()` creates the mesh.

Scripts call `FSDP(...)` and `fully_shard(...)` unchanged. Calls without a group and mesh get the mesh of `tsm.state`.
An explicit group or mesh is kept and logged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from smddp.sagemaker.fsdp.fsdp1_views import refer_to_first
from smddp.sagemaker.parallel import DIMENSIONS
from smddp.sagemaker.replaced import Watch, recording
from smddp.sagemaker.replicas import Unchecked
from smddp.sagemaker.state_handler import state

log = logging.getLogger("smddp.sagemaker")

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def fsdp_init(original: Callable[..., None]) -> Callable[..., None]:
    """`FullyShardedDataParallel.__init__` that fills in strategy and mesh."""
    signature = inspect.signature(original)

    def __init__(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("process_group") is None and bound.arguments.get("device_mesh") is None:
            strategy, mesh = placed(bound.arguments.get("sharding_strategy"))
            bound.arguments.update(sharding_strategy=strategy, device_mesh=mesh)
        elif not _is_ours(bound.arguments.get("device_mesh")):
            _warn_once(
                "FSDP was called with an explicit process group or mesh: hybrid_shard_degree has no effect on it"
            )
        module = bound.arguments["module"]
        if state.tp_size > 1:
            refer_to_first(module)
        with recording(module, f"FSDP({type(module).__name__})"):
            original(*bound.args, **bound.kwargs)
        given: DeviceMesh | None = bound.arguments.get("device_mesh")
        # A script's mesh may have equal names and other groups.
        if given is not None and state.mesh is not None and "replicate" in _names(given):
            if given.shape == state.mesh.shape[: given.ndim]:
                unchecked.add(self)

    return __init__


def registering_again(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps FSDP1's `_catch_all_reshard` to register the parameters of unsharded units again.

    During computation a unit's modules have plain views, until its gradients arrive. A frozen unit has no gradients,
    and torch treats an unsharded unit as already resharded.
    """

    @functools.wraps(original)
    def _catch_all_reshard(fsdp_state: Any) -> None:
        original(fsdp_state)
        handle = fsdp_state._handle
        if handle and handle._use_orig_params and not handle.uses_sharded_strategy:
            name, module, _ = handle.flat_param._param_infos[0]
            if name not in module._parameters:
                handle._use_unsharded_views(as_params=True)

    return _catch_all_reshard


def refusing_shared(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedDataParallel.__init__` that raises ValueError for a model whose parameters are DTensors."""

    @functools.wraps(original)
    def __init__(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                f"DistributedDataParallel({type(module).__name__}) after transform(): the parameters are DTensors now, "
                "whose gradients its reducer cannot copy into its buffers; its device_mesh= makes plain tensors of "
                "them, so that norms and checkpoints would take a rank's part for the whole; and spread experts must "
                "not be averaged. With hybrid_shard_degree=1, FSDP(model, use_orig_params=True) and fully_shard(model) "
                "do the same: they copy the model and average its gradients"
            )
        original(self, module, *args, **kwargs)

    return __init__


def _is_ours(mesh: DeviceMesh | None) -> bool:
    """Returns True if ``mesh`` is part of `tsm.state.mesh`, as nested units of SMP's units are."""
    return bool(_names(mesh)) and set(_names(mesh)) <= set(DIMENSIONS)


def _names(mesh: DeviceMesh | None) -> tuple[str, ...]:
    return (mesh.mesh_dim_names or ()) if mesh is not None else ()


# Modules that FSDP has wrapped and whose replicas the first step compares.
unchecked = Unchecked()
_said: set[str] = set()


def forget_warnings() -> None:
    """Resets the record of warnings, so that the next `tsm.init()` of this process repeats them."""
    _said.clear()


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def placed(asked: ShardingStrategy | None) -> tuple[ShardingStrategy, DeviceMesh]:
    """Returns the effective strategy for the requested strategy ``asked``, and its mesh."""
    mesh, degree = state.mesh, state.hybrid_shard_degree
    assert mesh is not None  # FSDP asks from `init` on
    if degree == 1:
        _say_replaced(asked, ShardingStrategy.NO_SHARD)
        return ShardingStrategy.NO_SHARD, mesh["replicate"]
    if asked == ShardingStrategy._HYBRID_SHARD_ZERO2:
        return asked, mesh["replicate", "shard"]
    if degree >= 2 or asked == ShardingStrategy.HYBRID_SHARD:
        _say_replaced(asked, ShardingStrategy.HYBRID_SHARD)
        return ShardingStrategy.HYBRID_SHARD, mesh["replicate", "shard"]
    # Degree 0 with tensor parallelism: one copy over all data-parallel ranks, sharded as the script asked.
    return asked or ShardingStrategy.FULL_SHARD, mesh["shard"]


def _say_replaced(asked: ShardingStrategy | None, by: ShardingStrategy) -> None:
    """Say that hybrid_shard_degree wins over the script's strategy; FULL_SHARD is what scripts that name none have."""
    if asked not in (None, ShardingStrategy.FULL_SHARD, by):
        _warn_once(
            f"FSDP was asked for {asked.name}: hybrid_shard_degree={state.hybrid_shard_degree} makes it {by.name}. "
            "_HYBRID_SHARD_ZERO2 is kept if parameters must remain unsharded between forward and backward; "
            "hybrid_shard_degree=0 leaves the choice to the script"
        )


def fully_shard_globals() -> tuple[dict[str, Any], list[str]]:
    """Returns the namespace where `fully_shard` looks up its default mesh function, and the function's name.

    Scripts import `fully_shard` before `tsm.init()`, so the function object cannot be replaced.
    """
    names = inspect.unwrap(fully_shard).__globals__
    return names, [name for name in ("_init_default_mesh", "_init_default_fully_shard_mesh") if name in names]


def default_mesh(*_: Any, **__: Any) -> DeviceMesh:
    """The mesh of a `fully_shard` call that names none: (replicate, shard), or one dimension if there is one copy."""
    mesh = state.mesh
    assert mesh is not None  # `fully_shard` asks from `init` on
    return mesh["shard"] if mesh.size(0) == 1 else mesh["replicate", "shard"]


def watch_optimizers() -> Callable[[], None]:
    """Check each optimizer's parameters and replicas before its first step. Returns an undo function."""
    watch = Watch()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        _follow_groups(optimizer)
        watch.check(optimizer)
        _refuse_sums(optimizer)
        unchecked.check(optimizer)

    remove = register_optimizer_step_pre_hook(before_step).remove

    def undo() -> None:
        remove()
        unchecked.clear()

    return undo


def _follow_groups(optimizer: torch.optim.Optimizer) -> None:
    """Let LBFGS step the parameters of its group: Accelerate puts those of FSDP2 there only."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer._params = optimizer.param_groups[0]["params"]


# They add up over all elements of a parameter, or of all parameters.
_SUMMING = ("LBFGS", "Adafactor")


def _refuse_sums(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer that adds up elements of several meshes, or of this rank's shards alone."""
    name = type(optimizer).__name__
    if name not in _SUMMING:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    flat = any(map(_is_fsdp_flattened, parameters))
    if flat and state.shard_size != 1:
        reason = "each rank's parameters are plain shards under FSDP1, so every rank would take another step"
        remedy = "Wrap the model with fully_shard, or set hybrid_shard_degree=1"
    elif flat and 0 < len(sharded) < len(parameters):
        reason = "experts are DTensors beside plain parameters under FSDP1, which torch cannot add up"
        remedy = "Wrap the model with fully_shard, or set expert_parallel_degree=1"
    elif name == "LBFGS" and len({parameter.device_mesh for parameter in sharded}) > 1:
        reason = "experts are on another mesh than the other parameters, and torch adds up DTensors of one mesh only"
        remedy = "Set expert_parallel_degree=1, or take another optimizer"
    else:
        return
    raise ValueError(f"{name} adds up over all elements: {reason}. {remedy}")


def around_fully_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind `fully_shard`, with a record of the parameters that it replaces and the modules it wraps."""

    @functools.wraps(original)
    def recorded(module: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            roots = module if isinstance(module, list | tuple) else [module]
            for root in roots:
                stack.enter_context(recording(root, f"fully_shard({type(root).__name__})"))
            result = original(module, *args, **kwargs)
        if kwargs.get("mesh") is None or _is_ours(kwargs["mesh"]):
            for root in roots:
                unchecked.add(root)
        return result

    return recorded


def watch_cache_flushes(statistics: Callable[[], dict[str, Any]] | None = None) -> Callable[[], None]:
    """Warn when the CUDA caching allocator flushed its cache since the last step. Returns an undo function."""
    statistics = statistics or torch.cuda.memory_stats
    before = 0

    def after_step(*_: Any) -> None:
        nonlocal before
        flushes = statistics().get("num_alloc_retries", 0)
        if flushes > before:
            warnings.warn(
                f"the CUDA caching allocator flushed its cache {flushes - before} times in this step, which stops the "
                "GPU each time: lower the memory use (smaller batch, activation checkpointing, a larger "
                "hybrid_shard_degree); fsdp_cache_flush_warnings=false turns this warning off",
                RuntimeWarning,
                stacklevel=3,
            )
        before = flushes

    return register_optimizer_step_post_hook(after_step).remove
