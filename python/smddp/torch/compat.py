"""Private names of torch, each with a fallback: a missing name disables one feature with one warning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from smddp.torch.private_names import private, warn_missing


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
