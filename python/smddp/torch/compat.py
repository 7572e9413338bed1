"""Private names of torch, each with a fallback: a missing name disables one feature with one warning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor

# The classes that a Python process group derives from and gets; torch.distributed itself does not import without it.
from torch._C import _distributed_c10d as c10d

from smddp.torch.private_names import PrivateName, private, warn_missing

__all__ = ["c10d", "warn_missing"]


def _record_function(name: str, tensors: Any, values: Any) -> Any:
    from torch.profiler import record_function

    return record_function(name)


#: Number of dispatch modes active on this thread.
dispatch_modes: Callable[[], int] = private(
    "torch._C._len_torch_dispatch_stack",
    "dispatch modes such as CommDebugMode do not see the calls of a smddp group",
    lambda: 0,
)

#: Returns whether a profiler records on this thread.
profiler_enabled: Callable[[], bool] = private(
    "torch.autograd._profiler_enabled", "the profiler shows no ranges of smddp", lambda: False
)

#: A profiler range of a name, tensors and a dict of values.
record_range: Callable[..., Any] = private(
    "torch._C._profiler._RecordFunctionFast",
    "the profiler's ranges of smddp have no sizes and values",
    _record_function,
)

#: A context in which no torch.func transform is active.
without_transforms: Callable[[], Any] = private(
    "torch._C._DisableFuncTorch",
    "inside a torch.func transform a collective on a strided tensor raises",
    nullcontext,
)


#: Number that says whether elements of a tensor share memory; 1: they do.
internal_overlap: Callable[[Tensor], int] = private(
    "torch._debug_has_internal_overlap",
    "an output with several elements in one place is not refused",
    lambda tensor: 0,
)

#: Returns whether a tensor is a wrapper of torch.func.functionalize.
is_functional: Callable[[Tensor], bool] = private(
    "torch._is_functional_tensor", "send and recv inside torch.func.functionalize raise", lambda tensor: False
)

RAW_STREAM = PrivateName(
    "torch._C._cuda_getCurrentRawStream", "CUDA tensors", "calls on CUDA tensors take a microsecond more"
)
_DUMP = PrivateName(
    "torch._C._distributed_c10d._dump_fr_trace_file",
    "the flight recorder",
    "a failed group writes no dump of torch's flight recorder",
)
_EVAL_FRAME = PrivateName(
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch.compile",
    "DistributedDataParallel under torch.compile stops at calls of a smddp group",
)


_FSDP2 = "overlap_fsdp and error_feedback_fsdp"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState."
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup."
FSDP2_STATE = PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", _FSDP2)
FSDP2_GROUPS = PrivateName(f"{_STATE}_fsdp_param_groups", _FSDP2)
FSDP2_GROUP = PrivateName(f"{_STATE}_fsdp_param_group", _FSDP2)  # before torch 2.11
FSDP2_FORWARD = PrivateName(f"{_STATE}_states_to_forward_prefetch", _FSDP2)
FSDP2_BACKWARD = PrivateName(f"{_STATE}_states_to_backward_prefetch", _FSDP2)
FSDP2_REDUCE = PrivateName(f"{_GROUP}_reduce_scatter_comm", _FSDP2)
FSDP2_HOOK = PrivateName(f"{_GROUP}_all_reduce_hook", _FSDP2)
GRAPH_TASK = PrivateName("torch._C._current_graph_task_id", "overlap_fsdp")
FSDP2_REPLICATED = PrivateName("torch.distributed.fsdp._fully_shard._fsdp_common.DDPMeshInfo", _FSDP2)
ENGINE = PrivateName("torch.autograd.Variable._execution_engine", "overlap_fsdp")
ACCUMULATE_HOOKS = PrivateName("torch.Tensor._post_accumulate_grad_hooks", "overlap_fsdp")


def fsdp2_groups(unit: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP2 module; each is gathered in one call.

    Raises MissingNameError if this torch's FSDP2 lacks an attribute that smddp reads.
    """
    state = FSDP2_STATE.of(unit)()
    for name in (FSDP2_FORWARD, FSDP2_BACKWARD):
        name.of(state)
    if hasattr(state, FSDP2_GROUPS.attribute):
        groups = list(FSDP2_GROUPS.of(state))
    else:
        group = FSDP2_GROUP.of(state)
        groups = [] if group is None else [group]
    for group in groups:
        for name in (FSDP2_REDUCE, FSDP2_HOOK):
            name.of(group)
    return groups


def dump_flight_recorder(rank: int, backend: str) -> None:
    """Writes the dump of torch's flight recorder to its file."""
    dump = _DUMP.find_or_warn()
    if dump is not None:
        dump(rank, backend=backend)


def skip_tracing(code: Any) -> None:
    """Excludes a function's code and its callees from tracing by torch.compile."""
    set_strategy = _EVAL_FRAME.find_or_warn()
    if set_strategy is not None:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        set_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


def async_collective_tensor() -> Any:
    """Returns the class of results of functional collectives; a large module, imported with the first such tensor."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor


def backend_plugins() -> dict[str, Any]:
    """Returns torch's registered backends by upper-case name; empty after a warning if this torch has no table."""
    import torch.distributed as dist

    table = getattr(dist.Backend, "_plugins", None)
    if table is None:
        warn_missing(
            "torch.distributed.Backend._plugins",
            "in a group such as 'cpu:gloo,cuda:smddp' only gloo and nccl are available besides smddp",
        )
    return table or {}
