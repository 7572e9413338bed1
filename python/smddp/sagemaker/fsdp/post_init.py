"""FSDP1's ``post_param_init_fn``, an argument that torch's class does not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


def with_post_param_init_fn(original: Callable[..., None]) -> Callable[..., None]:
    """`FullyShardedDataParallel.__init__` that also takes ``post_param_init_fn``.

    The function is called with each module right after ``param_init_fn`` was. FSDP hands its ``param_init_fn`` on to
    the units that it wraps inside, so joining the two there reaches them all. None changes nothing.
    """
    signature = inspect.signature(original)
    extra = inspect.Parameter("post_param_init_fn", inspect.Parameter.KEYWORD_ONLY, default=None)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, post_param_init_fn: Callable[[nn.Module], Any] | None = None, **kwargs: Any):
        if post_param_init_fn is not None:
            if not callable(post_param_init_fn):
                kind = type(post_param_init_fn).__name__
                raise TypeError(f"post_param_init_fn is a function of a module, not {kind}")
            bound = signature.bind(self, *args, **kwargs)
            param_init_fn = bound.arguments.get("param_init_fn")
            if param_init_fn is not None:
                bound.arguments["param_init_fn"] = _both(param_init_fn, post_param_init_fn)
            elif any(p.is_meta for p in bound.arguments["module"].parameters()):
                raise ValueError(
                    "FSDP(post_param_init_fn=...) of a model on the meta device needs param_init_fn, too: pass "
                    "DelayedParamIniter(model).get_param_init_fn()"
                )
            args, kwargs = bound.args[1:], bound.kwargs
        original(self, *args, **kwargs)

    # Other patches inspect the signature.
    full = signature.replace(parameters=[*signature.parameters.values(), extra])
    __init__.__signature__ = full  # type: ignore[attr-defined]
    return __init__


def _both(first: Callable[[nn.Module], Any], second: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    def param_init_fn(module: nn.Module) -> None:
        first(module)
        second(module)

    return param_init_fn
