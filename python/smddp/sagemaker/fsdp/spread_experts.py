"""FSDP sharding of distributed experts, over the ranks that hold the same experts.

The experts of each layer are a separate FSDP2 unit over the mesh (`expert_replicate`, `expert_shard`), with any wrapper
that the script uses. `fully_shard` finds them already sharded when it reaches the enclosing layer; FSDP1 ignores them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from smddp.sagemaker.expert_parallel.spread import spread_modules
from smddp.sagemaker.state_handler import state

_SHARDED = "_ep_sharded"  # attribute of experts that are a unit of FSDP
_OPTIONS = ("reshard_after_forward", "mp_policy", "offload_policy")
_KEPT = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD)


def mesh() -> DeviceMesh:
    """Returns the mesh over which FSDP shards and replicates experts."""
    whole = state.expert_mesh
    assert whole is not None  # only spread experts ask
    return whole["expert_shard"] if whole.size(0) == 1 else whole["expert_replicate", "expert_shard"]


def placement(parameter: nn.Parameter) -> Shard:
    """Returns the dimension that FSDP shards: the experts, if each rank gets equally many.

    Otherwise returns another divisible dimension, since FSDP2 requires even parts except in dimension 0. Raises
    ValueError if there is none.
    """
    ranks = mesh().size(-1)
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    taken = {place.dim for place in getattr(parameter, "placements", ()) if isinstance(place, Shard)} - {0}
    for dim, size in enumerate(local.shape):
        if dim not in taken and size % ranks == 0:
            return Shard(dim)
    raise ValueError(
        f"experts' parameters of {tuple(local.shape)} per rank cannot be cut into {ranks} equal parts for FSDP: lower "
        f"hybrid_shard_degree={state.hybrid_shard_degree}, or raise expert_parallel_degree={state.ep_size}"
    )


def shard_experts(model: nn.Module, **options: Any) -> list[nn.Module]:
    """Make the experts of every layer of ``model`` units of FSDP2; returns them all, earlier ones too."""
    found = list(spread_modules(model))
    fresh = [module for module in found if not hasattr(module, _SHARDED)]
    # Raises for all before the first is wrapped.
    if any(placement(parameter).dim for module in fresh for parameter in module.parameters()):
        options["shard_placement_fn"] = placement
    for module in fresh:
        setattr(module, _SHARDED, True)
        fully_shard(module, mesh=mesh(), **options)
    return found


def around_fully_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fully_shard`: first shards the experts in its argument."""

    @functools.wraps(original)
    def experts_first(module: Any, *args: Any, **kwargs: Any) -> Any:
        for root in module if isinstance(module, list | tuple) else [module]:
            if hasattr(root, _SHARDED) and "mesh" not in kwargs:
                raise ValueError("fully_shard was called on experts that are sharded already, by the call around them")
            shard_experts(root, **{name: kwargs[name] for name in _OPTIONS if name in kwargs})
        return original(module, *args, **kwargs)

    return experts_first


def replace_in_fully_shard(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wraps the inner function of `fully_shard` by ``around``; returns an undo function.

    Scripts import `fully_shard` before `tsm.init()`, so the outer function object cannot be replaced. The inner
    function is a closure variable.
    """
    wrapper: Any = fully_shard
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    cell.cell_contents = around(original)

    def undo() -> None:
        cell.cell_contents = original

    return undo


def around_fsdp1(original: Callable[..., None]) -> Callable[..., None]:
    """`FullyShardedDataParallel.__init__` that leaves spread experts to FSDP2."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if next(iter(spread_modules(given["module"])), None) is not None:
            if given.get("sync_module_states"):
                raise NotImplementedError(
                    "FSDP(sync_module_states=True) with expert_parallel_degree > 1: rank 0 does not hold all experts. "
                    "Make the model from one seed on every rank, or load it with load_pretrained after wrapping it"
                )
            if any(p.is_meta for module in spread_modules(given["module"]) for p in module.parameters()):
                raise NotImplementedError(
                    "FSDP of a model on the meta device with expert_parallel_degree > 1: wrap it with fully_shard, "
                    "which DelayedParamIniter(model).materialize() completes, or make it on a real device"
                )
            _ignore(given, shard_experts(given["module"], **_options(given)))
        original(*bound.args, **bound.kwargs)

    return __init__


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Translates FSDP1's options to FSDP2's options."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {"reshard_after_forward": given.get("sharding_strategy") not in _KEPT}
    precision = given.get("mixed_precision")
    if precision is not None:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=False
        )
    offload = given.get("cpu_offload")
    if offload is not None and offload.offload_params:
        options["offload_policy"] = CPUOffloadPolicy()
    return options


def _ignore(given: dict[str, Any], experts: list[nn.Module]) -> None:
    """Add ``experts`` to FSDP1's ignored modules or parameters, by the argument that the script uses."""
    states = list(given.get("ignored_states") or ())
    if states and not isinstance(states[0], nn.Module):
        known = set(map(id, states))
        parameters = (p for module in experts for p in module.parameters())
        given["ignored_states"] = [*states, *(p for p in parameters if id(p) not in known)]
    elif states:
        given["ignored_states"] = list({id(module): module for module in [*states, *experts]}.values())
    else:
        modules = [*(given.get("ignored_modules") or ()), *experts]
        given["ignored_modules"] = list({id(module): module for module in modules}.values())
