"""A step's arguments split into microbatches, and its results put together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch


class StepOutput:
    """Results of a step function, one per microbatch, in order.

    Attributes:
        outputs: one tensor for each microbatch.
    """

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        self.outputs = outputs

    def reduce_mean(self) -> torch.Tensor:
        """Return the mean over microbatches."""
        return torch.stack(self.outputs).mean(0)

    def reduce_sum(self) -> torch.Tensor:
        """Return the sum over microbatches."""
        return torch.stack(self.outputs).sum(0)

    def concat(self) -> torch.Tensor:
        """Concatenate all microbatches along the first dimension."""
        return torch.cat([each if each.dim() else each.reshape(1) for each in self.outputs])

    def stack(self) -> torch.Tensor:
        """Stack all microbatches along a new first dimension."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        """Return a copy detached from the graph; transformers calls this."""
        return StepOutput([each.detach() for each in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def each(value: Any, change: Callable[[Any, str], Any], name: str) -> Any:
    """Return a copy of ``value`` and its containers, with each leaf replaced by ``change(leaf, name)``."""
    if isinstance(value, Mapping):
        found = {key: each(value[key], change, f"{name}[{key!r}]") for key in value}
        if type(value) is dict:
            return found
        made: Any = copy.copy(value)
        for key, leaf in found.items():
            made[key] = leaf
        return made
    if isinstance(value, (list, tuple)):
        leaves = [each(leaf, change, f"{name}[{index}]") for index, leaf in enumerate(value)]
        return type(value)(*leaves) if hasattr(value, "_fields") else type(value)(leaves)
    return change(value, name)


def split(value: Any, microbatches: int, axis: Any, name: str) -> list[Any]:
    """Split one argument into one part per microbatch.

    Args:
        axis: along which its tensors are split; of a container, a container of these, or one for all in it.

    Raises ValueError for a tensor that does not divide.
    """
    if isinstance(value, Mapping) and isinstance(axis, Mapping):
        inner = {key: split(value[key], microbatches, axis.get(key, 0), f"{name}[{key!r}]") for key in value}
        parts = []
        for number in range(microbatches):
            made: Any = {} if type(value) is dict else copy.copy(value)
            for key, found in inner.items():
                made[key] = found[number]
            parts.append(made)
        return parts
    if isinstance(value, (list, tuple)) and isinstance(axis, (list, tuple)):
        lists = [split(leaf, microbatches, at, f"{name}[{i}]") for i, (leaf, at) in enumerate(zip(value, axis))]
        return [_like(value, [found[number] for found in lists]) for number in range(microbatches)]

    def part(number: int) -> Callable[[Any, str], Any]:
        return lambda leaf, at: _part(leaf, microbatches, number, axis, at)

    return [each(value, part(number), name) for number in range(microbatches)]


def _like(value: Any, leaves: list[Any]) -> Any:
    return type(value)(*leaves) if hasattr(value, "_fields") else type(value)(leaves)


def _part(leaf: Any, microbatches: int, number: int, axis: Any, name: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        if not leaf.dim():
            return leaf
        if not isinstance(axis, int) or not -leaf.dim() <= axis < leaf.dim():
            raise ValueError(f"step: {name} of shape {tuple(leaf.shape)} has no axis {axis!r} to split along")
        size = leaf.shape[axis]
        if size % microbatches:
            raise ValueError(
                f"step: {name} has {size} elements along axis {axis}, which {microbatches} microbatches do not divide: "
                "change the batch or 'microbatches', or name the argument in non_split_inputs"
            )
        return leaf.narrow(axis, number * (size // microbatches), size // microbatches)
    if hasattr(leaf, "smp_slice"):
        return leaf.smp_slice(microbatches, number, axis)
    return leaf


def joined(outputs: list[Any]) -> Any:
    """Join the microbatches' results: keep containers, with a `StepOutput` per tensor and a list per other value."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return StepOutput(outputs)
    if isinstance(first, Mapping):
        found = {key: joined([output[key] for output in outputs]) for key in first}
        if type(first) is dict:
            return found
        try:
            return type(first)(**found)
        except TypeError:
            return found
    if isinstance(first, (list, tuple)):
        return _like(first, [joined([output[index] for output in outputs]) for index in range(len(first))])
    return None if first is None and all(output is None for output in outputs) else list(outputs)
