"""Retention of handles for torch before 2.7.

C++ code of such a torch keeps only the C++ half of a handle that a Python group returned. After Python frees its half,
a wait in C++ never returns. Handles are therefore retained until they were waited for or their future was taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

RETAIN_HANDLES = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)

# Number of new handles between two sweeps, which drop the tensors of completed handles.
_SWEEP_AFTER = 256
# getrefcount of an object that only the table and the sweep reference.
_UNSHARED = 3

Method = TypeVar("Method", bound=Callable[..., Any])

_kept: dict[int, Any] = {}
_next_sweep = _SWEEP_AFTER


def retain_handle(handle: Any) -> None:
    """Retains a new handle."""
    global _next_sweep
    _kept[id(handle)] = handle
    if len(_kept) >= _next_sweep:
        for key in list(_kept):
            other = _kept.get(key)
            if other is not None and sys.getrefcount(other) <= _UNSHARED and other.is_over():
                other.drop_tensors()
        _next_sweep = len(_kept) + _SWEEP_AFTER


def releases_handle(method: Method) -> Method:
    """Decorator: releases the handle after the method. Returns the method itself if torch retains handles."""
    if not RETAIN_HANDLES:
        return method

    def releasing(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            _kept.pop(id(self), None)

    releasing.__name__ = method.__name__
    releasing.__doc__ = method.__doc__
    return releasing  # type: ignore[return-value]
