"""Initialisation functions of each module's direct tensors.

Another module may set a parameter: GPT-2's attention scales its projection's weight, and nn.MultiheadAttention zeroes
its output projection's bias. So all initialisation functions run once on meta tensors, without computing, to record
their writes. A module's recipe lists all functions, also of enclosing modules, that write its tensors. The
innermost function is first, the order in which a constructor runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from smddp.sagemaker import hf
from smddp.sagemaker.delayed_param.forms import Form, forms_of
from smddp.sagemaker.private_names import DISPATCH_MODE, INIT_WEIGHTS, storage_key

_Mode: Any = DISPATCH_MODE.find() or object

Key = tuple[int, str]
"""(id of the owning module, original name of its parameter, or name of its buffer)."""

Forms = dict[int, dict[str, Form | None]]
"""The original forms of the parameters of all modules, by the module's id."""


if TYPE_CHECKING:

    class Pretrained(nn.Module):
        """Interface of a transformers model, for type checking without transformers; see `is_pretrained`."""

        config: Any

        def _init_weights(self, module: nn.Module) -> None: ...


@dataclass(frozen=True)
class Step:
    """One initialisation function, applied to one module."""

    module: nn.Module
    name: str
    function: Callable[[], Any]


@dataclass
class Recipe:
    """Ordered initialisation functions of one module, and its tensors that no function writes in full."""

    steps: list[Step] = field(default_factory=list)
    unwritten: set[str] = field(default_factory=set)


def initialiser_of(module: nn.Module) -> Callable | None:
    """Returns the module's ``reset_parameters`` (``_reset_parameters`` in some torch modules), or None."""
    for name in ("reset_parameters", "_reset_parameters"):
        function = getattr(module, name, None)
        if callable(function):
            return function
    return None


def is_pretrained(module: nn.Module) -> TypeGuard[Pretrained]:
    """Returns True for a transformers model, which initialises its submodules from its config."""
    if callable(getattr(module, INIT_WEIGHTS.attribute, None)):
        return hasattr(module, "config")
    if hf.is_pretrained(module):
        raise INIT_WEIGHTS.error()
    return False


def recipes(model: nn.Module, names: dict[int, str], missing: dict[int, set[str]], forms: Forms) -> dict[int, Recipe]:
    """Returns the recipe of every module in ``missing``: {module id: names of its tensors that need a value}.

    The constructor's functions (reset_parameters) are in it only for tensors that the model's own `_init_weights`
    leaves alone, as that one runs last.
    """
    parents, owners = _family(model)
    modules = {id(m): m for m in model.modules()}
    found: dict[int, Recipe] = {}
    # Nothing real may be written, and a DTensor's random operators would set up their seeds by communication.
    with _replaced(model.modules(), forms, buffers=True):
        final = _written(modules, lambda m: _by_model(m, owners.get(id(m))), names)
        built = _written(modules, initialiser_of, names)
    for key, own in missing.items():
        module = modules[key]
        line = _line(module, parents)
        steps, left = _steps(line, key, own, final, names, lambda m: _by_model(m, owners.get(id(m))))
        if left:
            before, left_by_both = _steps(line, key, own, built, names, initialiser_of)
            steps, left = before + steps, left & left_by_both
        found[key] = Recipe(steps, left)
    return found


@contextlib.contextmanager
def others_on_meta(around: nn.Module, kept: nn.Module | None, forms: Forms) -> Iterator[None]:
    """Temporarily replaces all parameters under ``around`` except those of ``kept`` by meta tensors."""
    with _replaced((m for m in around.modules() if m is not kept), forms):
        yield


@contextlib.contextmanager
def buffers_kept(around: nn.Module, owner: nn.Module, written: Collection[str]) -> Iterator[None]:
    """Temporarily replaces buffers under ``around`` by copies, except ``owner``'s ``written`` buffers."""
    saved = [(module._buffers, dict(module._buffers)) for module in around.modules() if module._buffers]
    try:
        for holder, tensors in saved:
            for name, buffer in tensors.items():
                if buffer is not None and not (holder is owner._buffers and name in written):
                    holder[name] = buffer.clone()
        yield
    finally:
        for holder, tensors in saved:
            holder.update(tensors)


def _by_model(module: nn.Module, pretrained: Pretrained | None) -> Callable | None:
    return None if pretrained is None else (lambda: pretrained._init_weights(module))


def _family(model: nn.Module) -> tuple[dict[int, nn.Module], dict[int, Pretrained]]:
    """Returns each module's parent, and the innermost transformers model that contains or equals it."""
    parents: dict[int, nn.Module] = {}
    owners: dict[int, Pretrained] = {}
    for module in model.modules():  # parents first
        if is_pretrained(module):
            owners[id(module)] = module
        elif id(module) in parents and id(parents[id(module)]) in owners:
            owners[id(module)] = owners[id(parents[id(module)])]
        for child in module.children():
            parents.setdefault(id(child), module)
    return parents, owners


def _line(module: nn.Module, parents: dict[int, nn.Module]) -> list[nn.Module]:
    """Yields the module and its ancestors up to the root."""
    line = [module]
    while id(line[-1]) in parents:
        line.append(parents[id(line[-1])])
    return line


def _steps(line, key, own, written, names, function_of) -> tuple[list[Step], set[str]]:
    """Returns the steps that write the tensors ``own`` of the first module in ``line``, and the incomplete tensors."""
    steps, left = [], set(own)
    for module in line:
        there = {name: full for (owner, name), full in written.get(id(module), {}).items() if owner == key}
        if there.keys() & own:
            steps.append(Step(module, names[id(module)], function_of(module)))
            left -= {name for name, full in there.items() if full}
    return steps, left


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    both = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in both if tensor is not None]


def _written(modules, function_of, names) -> dict[int, dict[Key, bool]]:
    """Returns the writes of each module's function: {(owner, tensor name): True for the full tensor}."""
    tensors: dict[int, tuple[torch.Tensor, Key]] = {}
    for key, module in modules.items():
        for name, tensor in _own_tensors(module):
            # The first module in order owns a tied parameter.
            tensors.setdefault(storage_key(tensor), (tensor, (key, name)))
    found = {}
    with torch.no_grad():
        for key, module in modules.items():
            function = function_of(module)
            if function is None:
                continue
            before = dict(module._parameters)
            mode = _Writes(tensors)
            try:
                with mode:
                    function()
            except Exception as error:
                raise ValueError(
                    f"the initialisation of {names[key] or 'the model'} ({type(module).__name__}) fails on meta "
                    f"tensors: {type(error).__name__}: {error}. Pass init_method_using_config for this model"
                ) from error
            found[key] = mode.found
            # `p.data = value` and `self.weight = Parameter(...)` pass no operator that could be seen.
            for name, parameter in before.items():
                if parameter is None:
                    continue
                now = module._parameters.get(name)
                if now is not parameter or storage_key(parameter) not in tensors:
                    found[key][key, name] = True
                    module._parameters[name] = parameter
    return found


class _Writes(_Mode):
    """Dispatch mode that records full and partial writes to the known tensors."""

    def __init__(self, tensors: dict[int, tuple[torch.Tensor, Key]]) -> None:
        DISPATCH_MODE.get()
        super().__init__()
        self._tensors = tensors
        self.found: dict[Key, bool] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        known = self._tensors.get(storage_key(tensor))
        if known is not None:
            whole, key = known
            self.found[key] = self.found.get(key, False) or tensor.numel() == whole.numel()


@contextlib.contextmanager
def _replaced(modules: Iterable[nn.Module], forms: Forms, buffers: bool = False) -> Iterator[None]:
    """Temporarily replaces parameters (and buffers) by plain meta tensors of their original form; keeps ties."""
    saved: list[tuple[dict, dict]] = []
    twins: dict[int, nn.Parameter] = {}
    try:
        for module in modules:
            saved.append((module._parameters, dict(module._parameters)))
            # A module that is missing in `forms` is a wrapper added later.
            own = forms[id(module)] if id(module) in forms else forms_of(module)
            module._parameters.clear()
            for name, form in own.items():
                if form is not None and form.identity not in twins:
                    twins[form.identity] = form.empty("meta")
                module._parameters[name] = None if form is None else twins[form.identity]
            if buffers:
                saved.append((module._buffers, dict(module._buffers)))
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")
        yield
    finally:
        for holder, tensors in saved:
            holder.clear()
            holder.update(tensors)
