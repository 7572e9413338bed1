"""Handles that torch's C++ side holds but does not keep alive.

Before torch 2.7, C++ code that called a group written in Python kept the C++ half of the handle only. Once
Python lets its half go, a wait in C++ waits for ever. So there handles are kept here until somebody saw
them end, or took their future.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

NEEDED = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)

# Handles nobody looks at must not keep their tensors: a sweep comes after so many.
_SWEEP_AFTER = 256
# What getrefcount says of an object that only the table and the sweep itself hold.
_UNSHARED = 3

Method = TypeVar("Method", bound=Callable[..., Any])

_kept: dict[int, Any] = {}
_next_sweep = _SWEEP_AFTER


def keep(handle: Any) -> None:
    """Hold a handle that was just made."""
    global _next_sweep
    _kept[id(handle)] = handle
    if len(_kept) >= _next_sweep:
        for key in list(_kept):
            other = _kept.get(key)
            if other is not None and sys.getrefcount(other) <= _UNSHARED and other.is_over():
                other.drop_tensors()
        _next_sweep = len(_kept) + _SWEEP_AFTER


def last_look(method: Method) -> Method:
    """Marks a method after which C++ needs the handle no more. Costs nothing where torch keeps handles itself."""
    if not NEEDED:
        return method

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _kept.pop(id(self), None)

    look.__name__ = method.__name__
    look.__doc__ = method.__doc__
    return look  # type: ignore[return-value]
