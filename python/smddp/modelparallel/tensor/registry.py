"""`smp.tp_register`: classes of scripts, and the distributed modules that replace them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import nn

from smddp.modelparallel.names import keep
from smddp.modelparallel.tensor.marks import marked, options_of

log = logging.getLogger("smddp.modelparallel")

Hook = Callable[..., Any]
# The arguments that a registered module was made with.
_MADE = "_smp_made_with"


@dataclass(frozen=True)
class _Entry:
    dist_module: type[nn.Module]
    init_hook: Hook | None
    forward_hook: Hook | None
    return_hook: Hook | None


_registered: dict[type[nn.Module], _Entry] = {}


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: `DistributedModel` replaces each marked instance by a new ``dist_module``.

    Args:
        dist_module: class that replaces the marked one.
        init_hook: from the arguments of the class's ``__init__`` to (args, kwargs) of ``dist_module``'s; by default
            they are the same.
        forward_hook: the same for ``forward``.
        return_hook: from what ``dist_module`` returns to what the class would.
    """

    def register(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Register an existing class, see `tp_register`. Modules created before are not replaced."""
    for name, value in (("module_cls", module_cls), ("dist_module", dist_module)):
        if not (isinstance(value, type) and issubclass(value, nn.Module)):
            raise TypeError(f"smp.tp_register(): {name} must be a class of modules, got {value!r}")
    if init_hook is keep:
        log.info("smp.tp_register(): %s stays in place, and its own plan shares it", module_cls.__name__)
        return
    if module_cls not in _registered:
        _note_arguments(module_cls)
    _registered[module_cls] = _Entry(dist_module, init_hook, forward_hook, return_hook)


def _note_arguments(module_cls: type[nn.Module]) -> None:
    before = module_cls.__init__

    @functools.wraps(before)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        if type(self) is module_cls:
            self.__dict__[_MADE] = (args, kwargs)

    module_cls.__init__ = init  # type: ignore[method-assign]


def replace(module: nn.Module) -> nn.Module:
    """``module`` with distributed modules in place of registered ones that are marked: the outermost."""
    entry = _registered.get(type(module))
    if entry is not None and marked(module) and _MADE in module.__dict__:
        return _replacement(module, entry)
    for name, child in list(module.named_children()):
        found = replace(child)
        if found is not child:
            setattr(module, name, found)
    return module


def taken() -> set[str]:
    """Return the options that distributed modules of registered classes take."""
    return {name for entry in _registered.values() for name in signature(entry.dist_module.__init__).parameters}


def _replacement(module: nn.Module, entry: _Entry) -> nn.Module:
    args, kwargs = module.__dict__[_MADE]
    if entry.init_hook is not None:
        args, kwargs = entry.init_hook(*args, **kwargs)
    made = entry.dist_module(*args, **{**kwargs, **_taken(entry.dist_module, options_of(module))})
    if entry.forward_hook is not None or entry.return_hook is not None:
        before, after = entry.forward_hook, entry.return_hook

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                args, kwargs = before(*args, **kwargs)
            found = type(made).forward(made, *args, **kwargs)  # of the class that sharing gives it
            return found if after is None else after(found)

        made.__dict__["forward"] = hooked
    return made.train(module.training)


def _taken(dist_module: type[nn.Module], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a mark that the module's ``__init__`` names."""
    names = signature(dist_module.__init__).parameters
    return {name: value for name, value in options.items() if name in names}
