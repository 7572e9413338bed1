"""Profiler ranges, and the frame that every public method of the collectives runs in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

Method = TypeVar("Method", bound=Callable[..., Any])


def collective(name: str) -> Callable[[Method], Method]:
    """Marks a method as the collective `name`.

    Under a profiler the call is a range "smddp:name" (torch's own ranges come from a dispatcher that calls
    from Python do not pass). An exception goes through the group's `_failed`, which translates it and ends
    a coalescing block that it may have left open.
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
                translated = self._failed(error)
                if translated is error:
                    raise
                raise translated from None

        return call  # type: ignore[return-value]

    return wrap
