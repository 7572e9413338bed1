"""`smddp.experimental.overlap_fsdp`: overlap of FSDP2's collectives with computation on CPUs.

On GPUs streams overlap them. On a CPU torch's FSDP2 waits for each all_gather and reduce_scatter where it starts it, so
a step takes the sum of both times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from smddp.observability import log
from smddp.torch.compat import ACCUMULATE_HOOKS, ENGINE, FSDP2_REPLICATED, GRAPH_TASK, fsdp2_groups

# Pending gradient reductions: one in transfer, and one ready to start.
_IN_FLIGHT = 2
# Units gathered ahead in forward: one in transfer, and one more while the first is unpacked.
_AHEAD = 2


def overlap_fsdp(model: nn.Module) -> None:
    """Overlaps the all_gathers and reduce_scatters of an FSDP2 model on CPUs with its computation.

    Forward: while a unit computes, the next two units are gathered; `set_modules_to_forward_prefetch` takes precedence.
    The last two units are not resharded before their backward. Backward: the next unit is gathered, and
    gradients are waited for at the end. A unit whose gradients are read earlier is waited for immediately, and
    SMDDP_DEBUG=INFO logs the reason: accumulation (a second backward without zero_grad), a reduction over a second mesh
    dimension or by a hook, a division or conversion (float16, a reduce_dtype that differs from the parameters'), or a
    hook of the parameter. Values do not change. Two more units and the gradients of at most two units are in memory.
    backward() raises the errors of the collectives. A model on a GPU is unchanged. Works with any backend.

    Args:
        model: Module for which `fully_shard` was called, after it was called for all its parts and after
            `set_allocate_memory_from_process_group_for_comm`, if that is wanted.

    Raises:
        TypeError: The model is without FSDP2.
        RuntimeError: torch is older than 2.9.

    Example:
        >>> for block in model.blocks:
        ...     fully_shard(block)
        >>> fully_shard(model)
        >>> smddp.experimental.overlap_fsdp(model)
    """
    units = list(fsdp_units(model, "overlap_fsdp").values())
    if any(group.device.type != "cpu" for unit in units for group in fsdp_groups(unit)):
        log.info("overlap_fsdp: no effect, because streams of the model's device overlap its collectives")
        return
    gradients = _PendingReductions()
    for group in (group for unit in units for group in fsdp_groups(unit)):
        if not isinstance(group._reduce_scatter_comm, _ReduceScatter):
            group._reduce_scatter_comm = _ReduceScatter(group, group._reduce_scatter_comm, gradients)
            group.unshard_async_op = True
    for number, unit in enumerate(units):
        following = units[number + 1 : number + 1 + _AHEAD]
        if following and not unit._get_fsdp_state()._states_to_forward_prefetch:
            unit.set_modules_to_forward_prefetch(following)
    whole = units[0] is model
    parts = units[1:] if whole else units
    # Backward starts with the last units: they are not resharded, and the next unit is gathered before their backward.
    for unit in parts[-_AHEAD:]:
        unit.set_reshard_after_forward(False, recurse=False)
    if whole and parts[:-_AHEAD] and not units[0]._get_fsdp_state()._states_to_backward_prefetch:
        units[0].set_modules_to_backward_prefetch([parts[-_AHEAD - 1]])


def fsdp_units(model: nn.Module, what: str) -> dict[str, Any]:
    """Returns the modules for which `fully_shard` was called, by name. what: the function that errors name."""
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(f"{what} needs torch 2.9 or later, found torch {torch.__version__}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: expected a module, got {type(model).__name__}")
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not units:
        raise TypeError(f"fully_shard was not called for this {type(model).__name__}, nor for a module in it")
    return units


def fsdp_groups(unit: Any) -> list[Any]:
    """Returns the parameter groups of a unit; each is gathered in one call."""
    return fsdp2_groups(unit)


class _PendingReductions:
    """The pending reduce_scatters of a model's backward."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, Tensor, Tensor]] = deque()

    def add(self, work: Any, *tensors: Tensor) -> None:
        """Adds a reduce_scatter and keeps its tensors until the end of backward, which waits for it."""
        self._works.append((work, *tensors))
        ENGINE.get().queue_callback(self.wait)
        while len(self._works) > _IN_FLIGHT:
            self._works.popleft()[0].wait()

    def wait(self) -> None:
        failed: BaseException | None = None
        while self._works:
            try:
                self._works.popleft()[0].wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed


class _ReduceScatter:
    """Replacement for FSDP2's reduce_scatter `inner` of one parameter group: calls it and delays the wait."""

    def __init__(self, group: Any, inner: Any, gradients: _PendingReductions) -> None:
        self._group = group
        self.inner = inner
        self._gradients = gradients
        self._reported: str | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self.inner.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        work = self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=True)
        if async_op or work is None:
            return work
        reader = _reader(self._group, output_tensor, op)
        if reader is None:
            self._gradients.add(work, output_tensor, input_tensor)
            return None
        if reader != self._reported and log.is_enabled():
            self._reported = reader
            log.info(f"overlap_fsdp: no overlap of a unit's gradients: {reader}")
        work.wait()
        return None


def _reader(group: Any, output: Tensor, op: Any) -> str | None:
    """Returns the reason why the reduced gradients are read before the end of backward; None: they are not."""
    if GRAPH_TASK.get()() < 0:
        return "they are reduced outside of backward"
    if isinstance(group.mesh_info, FSDP2_REPLICATED.get()):
        return "they are reduced over a second dimension of the mesh"
    if group._all_reduce_hook is not None:
        return "an all-reduce hook takes them"
    if op == dist.ReduceOp.SUM:
        return "they may be divided afterwards"
    for parameter in group.fsdp_params:
        sharded = parameter.sharded_param
        if sharded.grad is not None:
            return "they are added to gradients that were not cleared"
        if ACCUMULATE_HOOKS.of(sharded):
            return "a hook of a parameter takes them"
        if parameter.offload_to_cpu:
            return "they are moved to the host"
        wanted = parameter.sharded_grad_dtype if hasattr(parameter, "sharded_grad_dtype") else parameter.orig_dtype
        if wanted is not None and wanted != output.dtype:
            return f"they are converted from {output.dtype} to {wanted}"
    return None
