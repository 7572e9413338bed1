"""Profiler ranges, and the frame that every public method of the collectives runs in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

from smddp.tensors import NoMemoryError
from smddp.waiting import waited_for

Method = TypeVar("Method", bound=Callable[..., Any])


def collective(name: str) -> Callable[[Method], Method]:
    """Marks a method as the collective `name`.

    Under a profiler the call is a range "smddp:name" (torch's own ranges come from a dispatcher that calls
    from Python do not pass). Results of functional collectives among the arguments are waited for. An exception
    goes through the group's `_failed`, which translates it and ends a coalescing block that it may have left open.
    """
    label = f"smddp:{name}"

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if _profiler_enabled():
                    with record_function(label):
                        return method(self, *args, **kwargs)
                return method(self, *args, **kwargs)
            except BaseException as error:
                waited = waited_for(args) if isinstance(error, NoMemoryError) else None
                if waited is None:
                    translated = self._failed(error)
                    if translated is error:
                        raise
                    raise translated from None
            # Nothing has moved yet.
            return call(self, *waited, **kwargs)

        _never_traced(call)
        return call  # type: ignore[return-value]

    return wrap


def _never_traced(function: Callable[..., Any]) -> None:
    """Keep torch.compile out of this function and of all that it calls.

    C++ calls our methods while Dynamo is active (DDP's reducer under torch.compile); without this it would trace
    them and stop at the first object of the native core. The names are private and newer than some torch that
    is served: where they are missing, so is the problem they solve.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        return
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
