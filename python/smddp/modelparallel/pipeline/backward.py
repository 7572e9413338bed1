"""The backward pass of one microbatch on one stage: its segments, from the last to the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from smddp.modelparallel.pipeline import mailbox
from smddp.modelparallel.pipeline.placed_tensor import Placed

if TYPE_CHECKING:
    from smddp.modelparallel.data_parallel.replicas import Replicas
    from smddp.modelparallel.pipeline.microbatch import Microbatch
    from smddp.modelparallel.pipeline.values import Segment


class Sums:
    """Gradients of a step, summed in a deterministic order.

    Each segment runs after the same segment of the previous microbatch, so the order of its sum is fixed. A parameter
    that several segments use has one sum per segment; these are added at the end.

    Args:
        parameters: of each part, by number, this stage's parameters.
        replicas: receives final gradients; None for a single replica.
    """

    def __init__(self, parameters: dict[int, list[torch.nn.Parameter]], replicas: Replicas | None = None) -> None:
        self._parameters, self._replicas = parameters, replicas
        # The segment whose sum is the parameter's own gradient: the first that used it in the first microbatch.
        self._home: dict[int, int] = {}
        self._apart: dict[tuple[int, int], tuple[torch.nn.Parameter, torch.Tensor]] = {}

    def begin(self, segments: list[Segment]) -> None:
        """Start a step, after the forward pass of the first microbatch."""
        for segment in segments:
            for parameter in self._of(segment):
                self._home.setdefault(id(parameter), segment.index)

    def _of(self, segment: Segment) -> list[torch.nn.Parameter]:
        return [parameter for number in sorted(segment.parts) for parameter in self._parameters.get(number, ())]

    def run(
        self, segment: Segment, tensors: list[torch.Tensor], gradients: list[Any], left: list[Segment] | None
    ) -> None:
        """Autograd's backward pass of one segment.

        ``left``: in the last microbatch, the remaining segments; else None.
        """
        guests = {
            id(parameter): parameter
            for parameter in self._of(segment)
            if self._home.get(id(parameter)) != segment.index
        }
        kept = [(parameter, parameter.grad) for parameter in guests.values()]
        for parameter in guests.values():
            _, parameter.grad = self._apart.pop((id(parameter), segment.index), (parameter, None))
        watching = (
            contextlib.nullcontext() if self._replicas is None else self._replicas.watching(self._final(segment, left))
        )
        with watching:
            torch.autograd.backward(tensors, gradients)
        for parameter, gradient in kept:
            if parameter.grad is not None:
                self._apart[id(parameter), segment.index] = (parameter, parameter.grad)
            parameter.grad = gradient

    def _final(self, segment: Segment, left: list[Segment] | None) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are complete after ``segment``."""
        if left is None:
            return []
        more = {number for number, _ in self._apart} | {id(q) for other in left for q in self._of(other)}
        return [q for q in self._of(segment) if self._home.get(id(q)) == segment.index and id(q) not in more]

    def end(self) -> None:
        """Add the sums of different segments."""
        for _, (parameter, gradient) in sorted(self._apart.items(), key=lambda item: -item[0][1]):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._apart = {}


def start(mb: Microbatch, divisor: int) -> None:
    """Record the roots of the backward pass: the tensors passed to `model.backward`."""
    for tensor, gradient in mb.roots:
        if isinstance(tensor, Placed):
            value = tensor.value
            if value.owner != mb.stage:
                continue
            own, made = value.tensor, value.segment
            assert own is not None and made is not None
            if not own.requires_grad:
                raise RuntimeError("model.backward() of a tensor that requires no gradient")
            begin = torch.ones_like(own) if gradient is None else gradient
            made.roots.append((own, begin / divisor))
        else:
            raise RuntimeError("model.backward() of a tensor that no module of the model took part in")


def segment(mb: Microbatch, at: Segment, sums: Sums, busy: Any, last: bool, on_caller: Callable[[Any], None]) -> None:
    """Run one segment backward: receive gradients of sent tensors, and send gradients of received tensors.

    ``last``: True for the last microbatch. ``on_caller`` runs a function on the thread that called the step.
    """
    tensors = [tensor for tensor, _ in at.roots]
    gradients = [gradient for _, gradient in at.roots]
    for tensor, number, to in at.sends:
        gradient = mb.wait(to, (mailbox.BACKWARD, mb.number, number, 0))
        if gradient is not None and tensor is not None:
            tensors.append(tensor)
            gradients.append(gradient)
    for tensor, slot in at.exits:
        if slot.gradient is not None:
            tensors.append(tensor)
            gradients.append(slot.gradient)

    def run() -> None:
        with busy("B", mb.number):
            sums.run(at, tensors, gradients, mb.segments[: at.index] if last else None)

    if tensors:
        # The allocator keeps less for other threads, and gradients of weights would be fresh pages each time.
        on_caller(run)
    for slot, number, source in at.arrivals:
        key = (mailbox.BACKWARD, mb.number, number, 0)
        mb.mail.send(source, key, mb.program.place(), slot.gradient)
        slot.gradient = None
    for kept in (at.roots, at.sends, at.exits, at.arrivals):
        kept.clear()
    at.cuts.clear()
