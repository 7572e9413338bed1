"""Descriptions of the result of a part, sent by its stage to the others once per kind of inputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from smddp.modelparallel.pipeline.placed_tensor import Form, Placed
from smddp.modelparallel.pipeline.shape_inference import autocast
from smddp.modelparallel.private_names import pytree

_SIMPLE = (int, float, str, bool, type(None))
# Immutable objects, which parts of several stages may share.
_CONSTANT = (torch.dtype, torch.device, torch.Generator, torch.nn.Module, type, slice, range, bytes)


@dataclass(frozen=True)
class Input:
    """A result that is one of the part's arguments."""

    index: int


@dataclass(frozen=True)
class Unsaid:
    """Result that exists only on the part's stage and cannot be described to others."""

    kind: str


@dataclass
class Description:
    """Result and side effects of a call of a part, for the stages that did not run it.

    Attributes:
        leaves: `Form`, `Input` or a plain value for each leaf of the result.
        tree: structure of the result, with numbered leaves.
        written: tensor arguments that the part wrote into.
        changed: mutable object arguments that the part changed.
    """

    leaves: list[Any]
    tree: Any
    written: tuple[int, ...]
    changed: tuple[int, ...]

    def same(self, other: Description) -> bool:
        """Return True if another call with such inputs had the same description."""
        return len(self.leaves) == len(other.leaves) and all(map(_same, self.leaves, other.leaves))

    def __str__(self) -> str:
        return ", ".join(map(_describe_leaf, self.leaves))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Form) and isinstance(other, Form):
        return one.alike(other)
    if isinstance(one, (*_SIMPLE, Form, Input)) or isinstance(other, (*_SIMPLE, Form, Input)):
        return type(one) is type(other) and bool(one == other)
    return type(one) is type(other)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Form):
        grad = " with gradient" if leaf.gradient else ""
        return f"{leaf.dtype} of shape {leaf.shape}{grad}"
    return f"argument {leaf.index}" if isinstance(leaf, Input) else repr(leaf)[:80]


def signature(flat: list[Any], spec: Any, training: bool) -> tuple[Any, ...]:
    """Return a key of everything that the form of a part's result may depend on."""
    parts: list[Any] = []
    for x in flat:
        if isinstance(x, Placed):
            parts.append(("placed", x.form.shape, x.form.dtype, x.form.gradient))
        elif isinstance(x, torch.Tensor):
            parts.append(("plain", tuple(x.shape), x.dtype, x.requires_grad))
        else:
            parts.append((type(x).__name__, x) if isinstance(x, _SIMPLE) else type(x).__name__)
    return (str(spec), tuple(parts), training, torch.is_grad_enabled(), autocast())


def digest(signed: tuple[Any, ...]) -> int:
    """Return a hash of a signature, equal on all ranks."""
    return int.from_bytes(hashlib.blake2b(repr(signed).encode(), digest_size=7).digest(), "big")


def mutable(x: Any) -> bool:
    """Return True if a part could change the object for other holders of a reference."""
    if isinstance(x, (torch.Tensor, *_SIMPLE, *_CONSTANT)) or callable(x):
        return False
    return hasattr(x, "__dict__") or isinstance(x, (set, bytearray))


def fingerprint(x: Any, depth: int = 3) -> Any:
    """Return a value that changes if an object, or an object that it refers to, is modified."""
    if isinstance(x, torch.Tensor):
        return id(x), x._version
    if isinstance(x, _SIMPLE):
        return x
    if depth == 0 or isinstance(x, _CONSTANT):
        return id(x)
    if isinstance(x, (list, tuple, set)):
        return id(x), tuple(fingerprint(each, depth - 1) for each in x)
    if isinstance(x, dict):
        return id(x), tuple((str(key), fingerprint(each, depth - 1)) for key, each in x.items())
    inner = getattr(x, "__dict__", None)
    return (id(x), fingerprint(inner, depth - 1)) if inner else id(x)


def describe(
    result: Any, inputs: list[Any], versions: list[int | None], objects: dict[int, Any]
) -> tuple[Description, list[Any]]:
    """Return the description of a completed call, and the leaves of its result.

    Args:
        inputs: leaves of the arguments.
        versions, objects: tensor versions and object fingerprints before the call, by index.
    """
    leaves, spec = pytree.tree_flatten(result)
    places = {id(x): index for index, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    forms: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            forms.append(Input(places[id(leaf)]) if id(leaf) in places else Form.of(leaf))
        elif isinstance(leaf, _SIMPLE):
            forms.append(leaf)
        else:
            forms.append(next((Input(i) for i, x in enumerate(inputs) if x is leaf), Unsaid(type(leaf).__name__)))
    written = tuple(
        i for i, (x, before) in enumerate(zip(inputs, versions)) if before is not None and x._version != before
    )
    changed = tuple(i for i, before in objects.items() if fingerprint(inputs[i]) != before)
    tree = pytree.tree_unflatten(list(range(len(leaves))), spec)
    return Description(forms, tree, written, changed), leaves
