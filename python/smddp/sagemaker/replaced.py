"""Detection of optimizers that hold parameters replaced by a wrapper."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
T = TypeVar("T")

# Attribute of a parameter that a model no longer uses: (the call that replaced it, its name there).
_REPLACED = "_smp_replaced"
_replacements = 0


class UntrainedParameters(ValueError):
    """An optimizer holds parameters that transform(), FSDP(...) or fully_shard(...) replaced after it was created."""


@contextlib.contextmanager
def recording(module: nn.Module, call: str) -> Iterator[None]:
    """Marks the parameters that ``module`` has before the block and not after it as replaced by ``call``."""
    global _replacements
    # Weak references, so that the wrapper can free the memory of what it replaces.
    before = [(name, weakref.ref(parameter)) for name, parameter in module.named_parameters()]
    yield
    after = set(map(id, module.parameters()))
    for name, reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in after:
            setattr(parameter, _REPLACED, (call, name))
            _replacements += 1


def recorded(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, whose first argument is a module, with a record of the parameters that it replaces."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        model = args[0] if args else kwargs.get("model")
        if not isinstance(model, nn.Module):
            return function(*args, **kwargs)
        with recording(model, f"{function.__name__}()"):
            return function(*args, **kwargs)

    return wrapper


class Watch:
    """Finds optimizers whose parameters were replaced; repeats the search only after further replacements."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UntrainedParameters if ``optimizer`` holds trainable parameters that a wrapper replaced."""
        if self._seen.get(optimizer) == _replacements:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # A module outside the wrapped one may share a parameter and give it a gradient.
        trained = [p for p in parameters if p.requires_grad and p.grad is None and hasattr(p, _REPLACED)]
        if trained:
            call, name = getattr(trained[0], _REPLACED)
            raise UntrainedParameters(
                f"{type(optimizer).__name__} was created before {call}: {len(trained)} of its {len(parameters)} "
                f"parameters were replaced and get no gradient, first {name!r}. Create the optimizer after "
                "transform(), FSDP(...) and fully_shard(...), from model.parameters()"
            )
        self._seen[optimizer] = _replacements
