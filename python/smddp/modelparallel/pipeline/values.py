"""State of a placed tensor: its owner, its copies, and the segments of its graph."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch


class _Slot:
    """Holder of the gradient of a received tensor."""

    __slots__ = ("data", "gradient")

    def __init__(self, data: torch.Tensor | None) -> None:
        self.data = data
        self.gradient: torch.Tensor | None = None


class _Arrival(torch.autograd.Function):
    """A tensor from elsewhere: autograd stops here. No leaf of autograd's, as those refuse to be written in place."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, anchor: torch.Tensor) -> Any:
        ctx.slot = slot
        data, slot.data = slot.data, None
        return data

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        ctx.slot.gradient = gradient if ctx.slot.gradient is None else ctx.slot.gradient + gradient
        return None, None


class _Departure(torch.autograd.Function):
    """The version of a tensor that was sent, whatever is written into it later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient


def arrival(data: torch.Tensor) -> tuple[torch.Tensor, _Slot]:
    """``data`` as the beginning of a graph, and the slot for its gradient."""
    slot = _Slot(data)
    with torch.enable_grad():
        return _Arrival.apply(slot, torch.empty((), requires_grad=True)), slot


def departure(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that receives the gradient of a sent tensor; None if it requires none."""
    if not x.requires_grad:
        return None
    with torch.enable_grad():
        return _Departure.apply(x)


@dataclass
class Segment:
    """Computation of one microbatch on a stage between two waits. Segments have disjoint graphs.

    Attributes:
        sends: (departure, number of the value, stage) of each tensor sent out of it.
        arrivals: (slot, number of the value, stage) of each tensor received by it.
        exits: (tensor, slot) of each tensor that a later segment of this stage uses.
        cuts: the tensors of earlier segments as this one knows them, by the number of the value.
        roots: (tensor, gradient) that backward starts from.
        parts: the numbers of the parts that ran in it.
        closed: something was sent out of it, so what arrives now belongs to the next one.
    """

    index: int
    sends: list[tuple[torch.Tensor | None, int, int]] = field(default_factory=list)
    arrivals: list[tuple[_Slot, int, int]] = field(default_factory=list)
    exits: list[tuple[torch.Tensor, _Slot]] = field(default_factory=list)
    cuts: dict[int, torch.Tensor] = field(default_factory=dict)
    roots: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)
    closed: bool = False


class Value:
    """One value of a microbatch's program. All stages know it under the same number.

    Attributes:
        owner: the stage that has computed it.
        at: the stages that have it.
        tensor, segment: this stage's tensor, if it has one, and where that was made.
        family: the values that share its memory.
    """

    __slots__ = ("__weakref__", "at", "family", "gradient", "number", "owner", "segment", "tensor")

    def __init__(
        self,
        number: int,
        owner: int,
        gradient: bool,
        tensor: torch.Tensor | None = None,
        segment: Segment | None = None,
    ) -> None:
        self.number, self.owner, self.gradient = number, owner, gradient
        self.tensor, self.segment = tensor, segment
        self.at = {owner}
        self.family: weakref.WeakSet[Value] = weakref.WeakSet((self,))

    def join(self, other: Value) -> None:
        """It is a view of ``other``."""
        self.family = other.family
        self.family.add(self)
