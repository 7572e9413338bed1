"""Modules without a style, whose parameters and computation are replicated on every rank.

Their parameters are replicated DTensors, so that FSDP, optimizers, norms and checkpoints find parameters of one kind on
one mesh. Forward passes compute with plain tensors instead. Any module may read a parameter of another one, as
`nn.MultiheadAttention` and `F.linear(x, self.projection.weight)` do. So each attribute read of such a parameter gives
the plain tensor while a forward pass runs in this thread, and the DTensor otherwise. Gradients of the plain tensor
reach the DTensor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker.tensor_parallel.mixins import Mixin, extend
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.shards import NAME, check_gathered, is_gathered, local, replicate

T = TypeVar("T")
# Module attribute: names of the parameters that forward passes read as plain tensors.
WHOLE = "_tp_whole"
# Module attribute: set once `_enter` and `_leave` are hooks of the module.
_ENTERS = "_tp_enters"


class _Passes(threading.local):
    """Modules whose forward runs in this thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []


_passes = _Passes()


class Whole(Mixin):
    """A module whose parameters named in `WHOLE` are plain tensors in forward passes."""

    def __getattr__(self, name: str) -> Any:
        return as_read(super().__getattr__(name), self, name)


def as_read(value: Any, module: nn.Module, name: str) -> Any:
    """Return attribute ``name`` of ``module``: ``value``, or its plain tensor if a forward pass reads a whole one."""
    if isinstance(value, DTensor) and name in module.__dict__.get(WHOLE, ()):
        # FSDP's hooks read parameters that are not gathered, so this function must not raise; `_enter` does.
        if torch.compiler.is_compiling() or (_passes.modules and is_gathered(value, module)):
            return local(value)
    return value


def _enter(module: nn.Module, *_: Any) -> None:
    """Forward pre-hook: a forward pass of ``module`` begins. Raises RuntimeError if FSDP has not gathered it."""
    if torch.compiler.is_compiling():
        return
    for name in module.__dict__.get(WHOLE, ()):
        # FSDP1 computes with attributes, which it keeps beside the parameters or in their place.
        attribute = module.__dict__.get(name)
        parameter = module._parameters.get(name)
        if isinstance(attribute, DTensor):
            module.__dict__[name] = local(attribute)
        elif attribute is None and parameter is not None:
            check_gathered(parameter, module, name)
    _passes.modules.append(module)


def _leave(module: nn.Module, *_: Any) -> None:
    """Forward hook: the forward pass of ``module`` ends, by an exception too."""
    if torch.compiler.is_compiling():
        return
    running = _passes.modules
    # An exception in a pre-hook may leave `module` without an entry, and modules inside of it with theirs.
    for place in range(len(running) - 1, -1, -1):
        if running[place] is module:
            del running[place:]
            return


def outside_passes(original: Callable[..., T]) -> Callable[..., T]:
    """Wraps ``original``, a function of FSDP that needs a module's registered parameters, also during a pass."""

    @functools.wraps(original)
    def reading_parameters(*args: Any, **kwargs: Any) -> T:
        running, _passes.modules = _passes.modules, []
        try:
            return original(*args, **kwargs)
        finally:
            _passes.modules = running

    return reading_parameters


def read_plain(module: nn.Module, names: tuple[str, ...]) -> None:
    """Let forward passes read the parameters ``names`` of ``module`` as plain tensors."""
    extend(module, Whole)
    module.__dict__[WHOLE] = names


def hold_whole(model: nn.Module, tp: TensorGroup, but: tuple[type, ...]) -> None:
    """Replace every plain parameter of ``model`` by a DTensor that is replicated over the group.

    Args:
        but: classes of modules whose forward reads the local tensors itself.
    """
    made: dict[int, nn.Parameter] = {}  # by the parameter replaced, so that tied ones remain tied
    for path, module in model.named_modules():
        module.__dict__.setdefault(NAME, path)
        names = [name for name, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)]
        for name in names:
            parameter = module.get_parameter(name)
            if id(parameter) not in made:
                replicate(module, name, tp)
                made[id(parameter)] = module.get_parameter(name)
            module._parameters[name] = made[id(parameter)]
        if names and not isinstance(module, but):
            read_plain(module, tuple(names))
    _watch_passes(model)


def _watch_passes(module: nn.Module) -> bool:
    """Register `_enter` and `_leave` at `Whole` modules and modules around them; return whether ``module`` is one."""
    holds = WHOLE in module.__dict__
    for child in module.children():
        holds = _watch_passes(child) or holds
    if holds and _ENTERS not in module.__dict__:
        module.__dict__[_ENTERS] = True
        module.register_forward_pre_hook(_enter, prepend=True)
        module.register_forward_hook(_leave, always_call=True)
    return holds


def refuse_embeddings(model: nn.Module) -> None:
    """Raise NotImplementedError for embeddings that rescale their rows in place or have sparse gradients."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        what = f"{name}: {type(module).__name__}"
        if module.max_norm is not None:
            raise NotImplementedError(
                f"{what}(max_norm={module.max_norm}) rescales its rows in the forward pass, which sharded parameters "
                "lose: set max_norm=None and rescale after each optimizer step, or set tensor_parallel_degree=1"
            )
        if module.sparse:
            raise NotImplementedError(
                f"{what}(sparse=True) has sparse gradients, which no DTensor can hold: set sparse=False, or set "
                "tensor_parallel_degree=1"
            )
