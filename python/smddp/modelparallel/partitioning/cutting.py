"""Partitioning of a model: assign parts to stages, and free parameters of other stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smddp.modelparallel import delayed
from smddp.modelparallel.partitioning.partition import called, holds, owned
from smddp.modelparallel.pipeline import current
from smddp.modelparallel.pipeline.parts import Part
from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.pipeline.values import Value


class Cut:
    """A model over stages.

    Args:
        where: a stage for modules by name; those without follow the nearest module around them, else ``default``.

    Attributes:
        parts: (name, module, stage) of each part.
        roots: (name, module, stage) of each module with direct parameters and submodules on several stages.
        stage_of: the stage of each parameter, by id.
    """

    def __init__(self, model: nn.Module, where: dict[str, int], default: int) -> None:
        self.parts: list[tuple[str, nn.Module, int]] = []
        self.roots: list[tuple[str, nn.Module, int]] = []
        self.stage_of: dict[int, int] = {}
        self._own = _stages(model, where, default)
        self._seen: set[int] = set()
        self._visit("", model)
        for name, module, stage in self.parts:
            for parameter in module.parameters():
                self._place(name, parameter, stage)
        for name, module, stage in self.roots:
            for parameter in module.parameters(recurse=False):
                self._place(name, parameter, stage)

    def _place(self, name: str, parameter: nn.Parameter, stage: int) -> None:
        before = self.stage_of.setdefault(id(parameter), stage)
        if before != stage:
            raise ValueError(
                f"module {name} on stage {stage} shares a parameter with a module on stage {before}: put both on one"
            )

    def _visit(self, name: str, module: nn.Module) -> None:
        if not owned(module) or id(module) in self._seen:
            return
        self._seen.add(id(module))
        stages = {self._own[id(each)] for each in module.modules() if id(each) in self._own}
        if len(stages) == 1 and called(module):
            self.parts.append((name, module, stages.pop()))
            self._seen.update(id(each) for each in module.modules())
            return
        if any(parameter is not None for parameter in module._parameters.values()):
            self.roots.append((name, module, self._own[id(module)]))
        for key, child in module.named_children():
            self._visit(f"{name}.{key}" if name else key, child)


def _stages(model: nn.Module, where: dict[str, int], default: int) -> dict[int, int]:
    """Return the stage of each module with parameters or buffers, by id; modules that share one follow the first."""
    found: dict[int, int] = {}
    for name, module in model.named_modules():
        if holds(module):
            around = name
            while around not in where and around:
                around = around.rpartition(".")[0]
            found[id(module)] = where.get(around, default)
    first: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found[id(module)] = first.setdefault(id(parameter), found[id(module)])
    return found


def install(made: Cut, stage: int, busy: Any) -> list[Part]:
    """Install the parts in their modules, and make the parameters of roots available to steps."""
    parts = []
    for number, (name, module, owner) in enumerate(made.parts):
        part = Part(number, name, module, owner, module.forward, busy)
        module.__dict__["forward"] = part
        parts.append(part)
    for _, module, owner in made.roots:
        _place_parameters(module, owner, stage)
    return parts


def _place_parameters(module: nn.Module, owner: int, stage: int) -> None:
    """Inside a step, the parameters of a module whose code runs on all stages are placed tensors."""
    members = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            form = delayed.form_of(parameter)
            members[name] = property(_reader(parameter, form, owner, stage))
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def _reader(parameter: nn.Parameter, form: Form, owner: int, stage: int) -> Callable[[Any], Any]:
    return lambda module: _parameter(parameter, form, owner, stage)


def _parameter(parameter: nn.Parameter, form: Form, owner: int, stage: int) -> Any:
    mb = current.microbatch
    if mb is None or mb.backward or mb.inside:
        return parameter
    known = mb.parameters.get(id(parameter))
    if known is None:
        here = owner == stage
        value = Value(mb.next_number(), owner, form.gradient, parameter if here else None, mb.segments[0])
        known = mb.parameters[id(parameter)] = Placed(form, value)
    return known


def drop(model: nn.Module, made: Cut, stage: int) -> list[nn.Parameter]:
    """Free the parameters of other stages, and return them."""
    lost = [q for q in model.parameters() if made.stage_of[id(q)] != stage]
    for parameter in lost:
        parameter.requires_grad_(False)
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.grad = None
    return lost
