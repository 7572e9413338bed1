"""`model.module.module`: further names of the script's model, as releases with an inner wrapper had them.

The name is a class attribute that answers for registered modules. So a module's own attributes, copies and pickles do
not contain it.
"""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any
from weakref import WeakSet

from torch import nn

# Levels below DistributedModel.module: the developer guide writes `model.module.module.module`.
_LEVELS = 2


class Alias:
    """A module under another name. The chain ends, since callers unwrap models while they have a ``module``.

    Copies and pickles are those of the module.
    """

    __slots__ = ("_levels", "_module")

    def __new__(cls, module: nn.Module, levels: int) -> Alias:
        kind: Any = type(module)
        return object.__new__(_class_of(kind))

    def __init__(self, module: nn.Module, levels: int) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_levels", levels)

    def __getattr__(self, name: str) -> Any:
        if name != "module":
            return getattr(self._module, name)
        if self._levels == 1:
            raise AttributeError(name)
        return Alias(self._module, self._levels - 1)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __repr__(self) -> str:
        return repr(self._module)

    def __eq__(self, other: Any) -> bool:
        return self._module is (other._module if issubclass(type(other), Alias) else other)

    def __hash__(self) -> int:
        return hash(self._module)

    def __copy__(self) -> nn.Module:
        return copy.copy(self._module)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return operator.getitem, ((self._module,), 0)

    # `isinstance` and marks in a module's attributes hold under every name.
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return self._module.__dict__


@functools.cache
def _class_of(kind: type) -> type[Alias]:
    """Return the class of aliases of ``kind``, with its special methods: Python looks these up on the class alone."""

    def forward(name: str) -> Any:
        return lambda self, *args, **kwargs: getattr(type(self._module), name)(self._module, *args, **kwargs)

    special = (name for name in dir(kind) if name.startswith("__") and name not in dir(Alias))
    methods = {name: forward(name) for name in special if callable(getattr(kind, name))}
    return type(kind.__name__, (Alias,), {"__slots__": ("__weakref__",), **methods})


class _Name:
    """The attribute ``module`` of registered modules; others have it in their registry, if at all."""

    def __init__(self) -> None:
        self.registered: WeakSet[nn.Module] = WeakSet()

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module in self.registered:
            return Alias(module, _LEVELS)
        raise AttributeError("module")


_name = _Name()


def add_aliases(module: nn.Module) -> None:
    """Let the innermost module under the name ``module`` answer for further levels of it."""
    while isinstance(inner := module._modules.get("module"), nn.Module):
        module = inner
    if not hasattr(module, "module"):
        type(module).module = _name  # type: ignore[attr-defined]
        _name.registered.add(module)
