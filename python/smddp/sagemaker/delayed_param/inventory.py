"""Inventory of a model's meta tensors, taken before sharding changes the model."""

from __future__ import annotations

import torch
from torch import nn

from smddp.sagemaker.delayed_param import forms
from smddp.sagemaker.delayed_param.recipe import Forms, Key
from smddp.sagemaker.names import plain_name


class Inventory:
    """The meta tensors of a model with their owners, sharing modules and original forms.

    Attributes:
        model: the model.
        modules, names: module id -> the module, and its name without wrapper prefixes.
        forms: module id -> the original forms of its parameters.
        original: module id -> {name of a parameter: the original name}.
        owner: (module, name) of each meta parameter -> (module that initialises it, its name there).
        holders: owner -> all (module, name) that hold the parameter, the owner first.
        meta_buffers, meta_attributes: module id -> names of buffers and plain tensor attributes on meta.
        real_buffers: buffers with values, kept to restore them after to_empty().
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(module): module for module in model.modules()}
        self.names = {id(module): plain_name(f"{name}.").rstrip(".") for name, module in model.named_modules()}
        self.forms: Forms = {}
        self.original: dict[int, dict[str, str]] = {}
        self.owner: dict[Key, Key] = {}
        self.holders: dict[Key, list[Key]] = {}
        self.meta_buffers: dict[int, list[str]] = {}
        self.meta_attributes: dict[int, list[str]] = {}
        self.real_buffers: dict[Key, torch.Tensor] = {}
        first: dict[int, Key] = {}
        for key, module in self.modules.items():
            self.forms[key] = forms.forms_of(module)
            self.original[key] = forms.original_names(module)
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    owner = first.setdefault(id(parameter), (key, name))
                    self.owner[key, name] = owner
                    self.holders.setdefault(owner, []).append((key, name))
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self.meta_buffers.setdefault(key, []).append(name)
                elif buffer is not None:
                    self.real_buffers[key, name] = buffer
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    self.meta_attributes.setdefault(key, []).append(name)

    @property
    def empty(self) -> bool:
        """Returns True if nothing is on meta."""
        return not (self.owner or self.meta_buffers or self.meta_attributes)

    def originals(self) -> dict[int, set[str]]:
        """Maps each module id to the original names of the meta parameters that the module owns."""
        found: dict[int, set[str]] = {}
        for key, name in self.holders:
            found.setdefault(key, set()).add(self.original[key][name])
        return found

    def full_name(self, key: int, name: str) -> str:
        return f"{self.names[key]}.{name}" if self.names[key] else name
