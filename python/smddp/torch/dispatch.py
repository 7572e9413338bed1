"""Dispatch of collective calls: direct, or through torch's dispatcher while an observer is active.

torch runs hooks, flight recorder, NaN check and dispatch modes between a C++ group and the backend of a device. A call
of a Python group bypasses them, which halves the time of a small call. Each group therefore has a second torch group
(`hooks.py`) with the same backends and all observers. Calls pass through it only while there are observers; its backend
returns them to the method of this group.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from torch import Tensor

from smddp.torch.arguments import NoMemoryError
from smddp.torch.compat import dispatch_modes as _dispatch_modes
from smddp.torch.compat import profiler_enabled as _profiler_enabled
from smddp.torch.compat import skip_tracing
from smddp.torch.functional_results import waited_for
from smddp.torch.profiling import call_range
from smddp.torch.work import join

Method = TypeVar("Method", bound=Callable[..., Any])


class _DispatchedCalls(threading.local):
    """The backend's handles of this thread's dispatched calls, the innermost call last."""

    def __init__(self) -> None:
        self.works: list[list[Any]] = []


_dispatched_calls = _DispatchedCalls()


def collective(name: str) -> Callable[[Method], Method]:
    """Decorator: dispatches a method as the collective `name`, directly or through torch's dispatcher.

    Waits for results of functional collectives among the arguments. An exception passes through the group's `_failed`,
    which translates it and closes an open coalescing block. Under a profiler the call is a range "smddp:name".
    """

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._has_observers or _profiler_enabled() or _dispatch_modes():
                return observed(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                return failed(self, error, args, kwargs, observed)

        def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
            dispatched = self._dispatched(method.__name__)
            if dispatched is None:
                return direct(self, *args, **kwargs)
            works = _dispatched_calls.works
            works.append([])
            try:
                answer = dispatched(*args, **kwargs)
            except BaseException as error:
                # An observer may have raised it, outside of the method.
                translated = self._failed(error)
                if translated is error:
                    raise
                raise translated from None
            finally:
                handles = works.pop()
            own_dispatch = _has_own_dispatch(args)
            if handles:
                # torch's handle lacks our methods. A wrapper subclass makes one call for each inner tensor.
                return join(handles) if own_dispatch else handles[-1]
            # The backend was not called: a mode or a subclass skipped it, or torch ignored a tensor without memory.
            return answer if own_dispatch or _dispatch_modes() else direct(self, *args, **kwargs)

        def direct(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if _profiler_enabled():
                    with call_range(name, args):
                        return method(self, *args, **kwargs)
                return method(self, *args, **kwargs)
            except BaseException as error:
                return failed(self, error, args, kwargs)

        def failed(
            self: Any,
            error: BaseException,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            dispatch: Callable[..., Any] | None = None,
        ) -> Any:
            if isinstance(error, NoMemoryError):  # raised before any data is sent
                waited = waited_for(args)
                if waited is not None:
                    return direct(self, *waited, **kwargs)
                if dispatch is not None:
                    # torch's dispatcher unwraps the tensors of torch.func's transforms and of wrapper subclasses.
                    return dispatch(self, *args, **kwargs)
            translated = self._failed(error)
            if translated is error:
                raise
            raise translated from None

        for function in (call, observed, direct):
            _never_traced(function)
        vars(call)["direct"] = direct
        return cast(Method, call)

    return wrap


def call_group(group: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of a device's backend on its group, without another dispatch, and records its handle."""
    found = getattr(type(group), method)
    work = getattr(found, "direct", found)(group, *args, **kwargs)
    if _dispatched_calls.works:
        _dispatched_calls.works[-1].append(work)
    return work


def current_work() -> Any:
    """Returns the handle of this thread's innermost dispatched call; None before its backend was called."""
    return _dispatched_calls.works[-1][-1] if _dispatched_calls.works and _dispatched_calls.works[-1] else None


def _has_own_dispatch(arguments: Iterable[Any]) -> bool:
    """Returns whether a tensor among the arguments is of a class that implements `__torch_dispatch__`."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            if type(argument).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                return True
        elif isinstance(argument, (list, tuple)) and _has_own_dispatch(argument):
            return True
    return False


def _never_traced(function: Callable[..., Any]) -> None:
    """Excludes the function and its callees from tracing by torch.compile.

    C++ calls our methods while Dynamo is active (DDP's reducer under torch.compile). Dynamo would trace them and stop
    at the first object of the native core.
    """
    skip_tracing(function.__code__)
