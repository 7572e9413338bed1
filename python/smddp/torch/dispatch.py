"""The two doors into a collective: straight in, or by way of torch's dispatcher while somebody listens there.

torch's hooks, its flight recorder, its NaN check and its dispatch modes stand in torch's dispatcher, between a group
of torch's own and the backend of a device. Python that calls a group written in Python does not pass there, which makes
a small call half as long. So a group has one of torch's own beside it (`hooks.py`), with the same backends and all
listeners, and calls go through that one while there is anybody to hear of them. They come out at the backend, which
brings them to the method that they were meant for.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor

from smddp.torch.arguments import NoMemoryError
from smddp.torch.compat import dispatch_modes as _dispatch_modes
from smddp.torch.compat import profiler_enabled as _profiler_enabled
from smddp.torch.functional_results import waited_for
from smddp.torch.profiling import call_range
from smddp.torch.work import join

Method = TypeVar("Method", bound=Callable[..., Any])


class _OnTheWay(threading.local):
    """The handles that each of this thread's calls in the dispatcher got from its backend, the innermost call last."""

    def __init__(self) -> None:
        self.works: list[list[Any]] = []


_on_the_way = _OnTheWay()


def collective(name: str) -> Callable[[Method], Method]:
    """Marks a method as the collective `name`, and gives it its two doors.

    Results of functional collectives among the arguments are waited for. An exception goes through the group's
    `_failed`, which translates it and ends a coalescing block that it may have left open. Under a profiler the call is
    a range "smddp:name".
    """

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self._heard or _profiler_enabled() or _dispatch_modes():
                return heard(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except BaseException as error:
                return failed(self, error, args, kwargs, heard)

        def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
            through = self._dispatched(method.__name__)
            if through is None:
                return direct(self, *args, **kwargs)
            works = _on_the_way.works
            works.append([])
            try:
                answer = through(*args, **kwargs)
            except BaseException as error:
                # A listener may have raised it, of whom the method knows nothing.
                translated = self._failed(error)
                if translated is error:
                    raise
                raise translated from None
            finally:
                arrived = works.pop()
            own_dispatch = _has_own_dispatch(args)
            if arrived:
                # torch's own handle of it knows less. A wrapper subclass makes one call for each tensor inside it.
                return join(arrived) if own_dispatch else arrived[-1]
            # It did not reach the backend. A mode or a subclass may want that; torch ignores tensors without memory.
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
            if isinstance(error, NoMemoryError):  # nothing has moved yet
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

        for function in (call, heard, direct):
            _never_traced(function)
        call.direct = direct  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return wrap


def arrive(group: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that came to the backend of a device, out of the dispatcher or of anybody's hands: past both doors."""
    found = getattr(type(group), method)
    work = getattr(found, "direct", found)(group, *args, **kwargs)
    if _on_the_way.works:
        _on_the_way.works[-1].append(work)
    return work


def current_work() -> Any:
    """The handle of this thread's call that is in the dispatcher and has been to its backend; else None."""
    return _on_the_way.works[-1][-1] if _on_the_way.works and _on_the_way.works[-1] else None


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
