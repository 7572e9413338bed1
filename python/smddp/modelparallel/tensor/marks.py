"""Marks on modules that a script wants to share, read by `DistributedModel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from smddp.modelparallel.new_modules import marking
from smddp.modelparallel.tensor.initial import initial_values

# The options given with the innermost context that a module was made in, or to the last call; None: not to be shared.
MARK = "_smp_tensor"


def marked(module: nn.Module) -> bool:
    """Return True if a module is marked for sharing."""
    return module.__dict__.get(MARK) is not None


def any_marked(model: nn.Module) -> bool:
    """Return True if ``model``, or a module in it, is to be shared."""
    return any(map(marked, model.modules()))


def options_of(module: nn.Module) -> dict[str, Any]:
    """Return the options of the mark."""
    return dict(module.__dict__.get(MARK) or {})


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Share the layers of modules created inside over the tensor group, if possible; the innermost context wins.

    Args:
        options: arguments of the distributed modules that `tp_register` puts in place of others. Those of the
            original's kernels (``fused_softmax``, ``fused_bias_gelu``, ``flash_attention`` and so on) change nothing.
    """
    with marking(MARK, options if enabled else None), initial_values() if enabled else contextlib.nullcontext():
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Enables or disables sharing of a module and its submodules. Call it before `DistributedModel`.

    Args:
        module: The module.
        enabled: False: the module stays whole on every rank.
    """
    if getattr(module, "_is_distributed_model", False):
        raise RuntimeError(
            "smp.set_tensor_parallelism() comes before smp.DistributedModel(), which shares the layers: give it the "
            "script's module"
        )
    for each in module.modules():
        each.__dict__[MARK] = options if enabled else None
