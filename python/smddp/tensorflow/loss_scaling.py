"""Gradient reduction outside Keras's `LossScaleOptimizer`.

A `LossScaleOptimizer` applies a step, or skips it and lowers the scale, by the gradients that it receives. The inner
optimizer runs in the first case only. If the inner optimizer reduced gradients, ranks with an overflow would leave out
that all_reduce. `Model.compile` adds a `LossScaleOptimizer` under the mixed_float16 policy, so the wrapping order is
known at the first step only.

The first step therefore moves the reduction from the inner optimizer to the `LossScaleOptimizer`. All ranks then decide
by the same reduced gradients, which are infinite or NaN where those of one rank are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

#: Moves the reduction of an inner optimizer to the optimizer around it.
Move = Callable[[Any, Any], None]


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a `LossScaleOptimizer`, None for every other one."""
    return getattr(optimizer, "inner_optimizer", None)


def watch(kind: type, method: str, is_distributed: Callable[[Any], bool], move: Move) -> None:
    """Has each `LossScaleOptimizer` of the Keras that defines `kind` call `move` before its first `method`, if its
    inner optimizer is distributed. Repeated calls change nothing.

    method: the name of the method that applies gradients.
    """
    for scaling in _classes(kind):
        plain = vars(scaling).get(method)
        if plain is not None and not hasattr(plain, "_smddp"):
            setattr(scaling, method, _moving_first(plain, method, is_distributed, move))


def _moving_first(plain: Any, method: str, is_distributed: Callable[[Any], bool], move: Move) -> Any:
    @wraps(plain)
    def apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        inner = inner_optimizer(self)
        if not is_distributed(inner):
            return plain(self, *arguments, **keywords)
        move(inner, self)
        return getattr(self, method)(*arguments, **keywords)

    apply._smddp = True  # type: ignore[attr-defined]
    return apply


def _classes(kind: type) -> list[type]:
    """Keras 3 has one class; Keras 2 a base and one class for each of its two families of optimizers.

    The exported name is that of the base or, in Keras 2.12's own package, that of one family.
    """
    for base in kind.__mro__:
        keras = sys.modules.get(base.__module__.partition(".")[0])
        scaling = getattr(getattr(keras, "mixed_precision", None), "LossScaleOptimizer", None)
        if isinstance(scaling, type):
            root = [each for each in scaling.__mro__ if each.__module__ == scaling.__module__][-1]
            return [root, *root.__subclasses__()]
    return []
