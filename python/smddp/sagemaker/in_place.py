"""Replacement of functions that scripts have imported by name: the function object stays and gets other code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

Function = Callable[..., Any]

# Present behavior of each changed function, by module and name.
_changed: dict[str, Function] = {}


def wrap(function: Function, around: Callable[[Function], Function]) -> Callable[[], None]:
    """Replaces the code of ``function`` by ``around(function)``, for every holder of the function object.

    Args:
        function: a Python function; decorators that set ``__wrapped__`` are looked through. It must use no variables
            of an enclosing function.
        around: gets the present behavior and returns the new one.

    Returns:
        A function that undoes the change; later changes of the same function must be undone first.
    """
    target: Any = inspect.unwrap(function)
    key = f"{target.__module__}.{target.__qualname__}"
    code, before = target.__code__, _changed.get(key)
    original = before
    if original is None:
        original = FunctionType(code, target.__globals__, target.__name__, target.__defaults__, target.__closure__)
        original.__kwdefaults__ = target.__kwdefaults__
        original.__signature__ = inspect.signature(target)  # type: ignore[attr-defined]
    _changed[key] = replacement = around(original)
    constants = tuple(key if each == "KEY" else each for each in _forward.__code__.co_consts)
    target.__code__ = _forward.__code__.replace(co_consts=constants)
    target.__signature__ = inspect.signature(replacement)

    def undo() -> None:
        target.__code__ = code
        if before is None:
            del _changed[key], target.__signature__
        else:
            _changed[key] = before
            target.__signature__ = inspect.signature(before)

    return undo


def call(key: str, *args: Any, **kwargs: Any) -> Any:
    """Calls the present behavior of a changed function."""
    return _changed[key](*args, **kwargs)


def _forward(*args: Any, **kwargs: Any) -> Any:
    # This code runs with the globals of the changed function.
    from smddp.sagemaker.in_place import call as present

    return present("KEY", *args, **kwargs)
