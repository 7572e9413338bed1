"""Private names of torch that this package uses; see `smddp.torch.private_names`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from smddp.torch.private_names import PrivateName

_NO_MODES = "inside smp.step the caller's torch function modes, such as torch.device(...), have no effect"
_DEFAULT_LIMIT = "messages between stages have torch's default timeout, not the group's"

pytree = PrivateName("torch.utils._pytree", "smp.step")
fake_tensor = PrivateName("torch._subclasses.fake_tensor", "smp.step")
MAKE_WRAPPER = PrivateName("torch.Tensor._make_wrapper_subclass", "smp.step")
NO_FUNCTION_OVERRIDES = PrivateName("torch._C.DisableTorchFunctionSubclass", "smp.step")
FUNCTION_MODES = PrivateName("torch.overrides._get_current_function_mode_stack", "smp.step", _NO_MODES)
GET_BACKEND = PrivateName("torch.distributed.ProcessGroup._get_backend", "timeouts of smp.step", _DEFAULT_LIMIT)
DEFAULT_TIMEOUT = PrivateName(
    "torch.distributed.distributed_c10d._get_default_timeout", "timeouts of smp.step", _DEFAULT_LIMIT
)
GRAPH_TASK = PrivateName("torch._C._current_graph_task_id", "loss.backward() outside of smp.step")
ENGINE = PrivateName("torch.autograd.Variable._execution_engine", "loss.backward() outside of smp.step")


@cache
def fake_mode() -> AbstractContextManager[Any]:
    """Returns the mode in which operations compute the form of their results only."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Returns the timeout of a group, in seconds."""
    limit: Any = None
    if GET_BACKEND.find_or_warn() is not None:
        try:
            limit = group._get_backend(torch.device("cpu")).options._timeout
        except (AttributeError, RuntimeError):
            pass
    if limit is None:
        default = DEFAULT_TIMEOUT.find_or_warn()
        limit = dist.constants.default_pg_timeout if default is None else default(dist.get_backend(group))
    return limit.total_seconds() if isinstance(limit, timedelta) else float(limit)


def function_modes() -> list[Any]:
    """Returns the torch function modes that are active on this thread."""
    stack = FUNCTION_MODES.find_or_warn()
    return [] if stack is None else list(stack())
