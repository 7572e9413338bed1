"""Source of each meta tensor's value: a recipe, or a second construction of the model."""

from __future__ import annotations

import torch
from torch import nn

from smddp.sagemaker.delayed_param import rebuilt, recipe
from smddp.sagemaker.delayed_param.inventory import Inventory
from smddp.sagemaker.names import plain_name, some


def sources(has: Inventory, seed: int, custom: bool) -> tuple[dict[int, recipe.Recipe], dict[recipe.Key, torch.Tensor]]:
    """(recipes by module, values that only constructors know by module and name).

    With ``custom``, a function of the user's sets the parameters, and only buffers are looked for. Raises
    `ValueError` that names the tensors for which there is neither.
    """
    parameters = {} if custom else has.originals()
    missing = {key: set(names) for key, names in parameters.items()}
    for key, names in has.meta_buffers.items():
        missing.setdefault(key, set()).update(names)
    recipes = recipe.recipes(has.model, has.names, missing, has.forms) if missing else {}
    keep = {(type(has.modules[k]), n) for k, r in recipes.items() for n in r.unwritten & parameters.get(k, set())}
    known: dict[recipe.Key, torch.Tensor] = {}
    failed = ""
    if keep or has.meta_buffers or has.meta_attributes:
        known, failed = _rebuilt(has, recipes, keep, seed)
    if not custom:
        _refuse_unknown(has, recipes, known, failed)
    return recipes, known


def _rebuilt(
    has: Inventory, recipes: dict[int, recipe.Recipe], keep: set[tuple[type, str]], seed: int
) -> tuple[dict[recipe.Key, torch.Tensor], str]:
    """Returns the tensors of a second construction of each transformers model, and the reason of a failure."""
    known: dict[recipe.Key, torch.Tensor] = {}
    failed = ""
    inside: set[int] = set()
    for module in has.modules.values():
        if not recipe.is_pretrained(module) or id(module) in inside:
            continue
        inside |= {id(m) for m in module.modules()}
        try:
            twin = dict(rebuilt.rebuild(module, keep, seed).named_modules())
        except ValueError as error:
            failed = f" ({error})"
            continue
        for name, own in module.named_modules():
            other = twin.get(plain_name(f"{name}.").rstrip("."))
            if other is not None:
                _take(has, recipes, own, other, known)
    return known, failed


def _take(has: Inventory, recipes: dict, own: nn.Module, other: nn.Module, known: dict) -> None:
    """Takes the values of the twin's module for the meta tensors of the model's module."""
    key = id(own)
    unwritten = recipes[key].unwritten if key in recipes else ()
    for name in {*unwritten, *has.meta_buffers.get(key, ()), *has.meta_attributes.get(key, ())}:
        value = getattr(other, name, None)
        mine = has.forms[key].get(name) or getattr(own, name)
        if isinstance(value, torch.Tensor) and not value.is_meta and value.shape == mine.shape:
            known[key, name] = value


def _refuse_unknown(has: Inventory, recipes: dict[int, recipe.Recipe], known: dict, failed: str) -> None:
    unknown = [
        f"{has.full_name(key, name)} ({type(has.modules[key]).__name__})"
        for key, found in recipes.items()
        for name in sorted(found.unwritten)
        if (key, name) not in known
    ]
    if unknown:
        raise ValueError(
            f"no way to initialise {len(unknown)} tensors on the meta device: {some(unknown)}. Give their modules a "
            "reset_parameters() that sets all their own parameters and buffers, or pass init_method_using_config"
            + failed
        )
