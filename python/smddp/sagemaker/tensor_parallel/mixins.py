"""Adding behaviour to one module object: its class becomes a subclass of what it was."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    # Mixins of `extend` get nn.Module's members from the extended class and must not add a second base.
    Mixin = nn.Module
else:
    Mixin = object

T = TypeVar("T")
# Class attribute of what `extend` makes.
_EXTENDED = "_tp_extended"


def is_extended(module: nn.Module) -> bool:
    """Returns True if `extend` has added a mixin to ``module``."""
    return hasattr(type(module), _EXTENDED)


def _rebuild(base: type, mixin: type, first: bool) -> nn.Module:
    module: nn.Module = nn.Module.__new__(_subclass(base, mixin, first))
    nn.Module.__init__(module)
    return module


@functools.cache
def _subclass(base: type, mixin: type, first: bool) -> type:
    def reduce(self: Any, protocol: Any) -> tuple:
        # The class is made at run time, so pickle cannot find it by name.
        return _rebuild, (base, mixin, first), self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__

    # The name stays: transformers looks losses, kernels and wrap policies up by it.
    names = {_EXTENDED: True, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    bases = (mixin, base) if first else (base, mixin)
    return type(base.__name__, bases, {**names, "__reduce_ex__": reduce})


def original(cls: type) -> type:
    """The class that a module was of before `extend`."""
    while _EXTENDED in vars(cls):
        cls = next(base for base in cls.__bases__ if base.__qualname__ == cls.__qualname__)
    return cls


def extend(module: nn.Module, mixin: type[T], first: bool = True) -> T:
    """Make ``module`` an instance of ``mixin`` too, and return it; ``first``: the mixin's methods win over the class's
    own.

    The class keeps its name, and the object can be copied and pickled.
    """
    # Annotate as plain types: mypy treats module classes as unhashable for the cache.
    base: type = type(module)
    added: type = mixin
    module.__class__ = _subclass(base, added, first)
    assert isinstance(module, mixin)
    return module
