"""Calls of a model outside of a step, for scripts with only tensor parallelism: one stage, no microbatches.

``loss.backward()`` averages the gradients over the replicas at its end, as DDP does. Where the ranks of a tensor group
read different batches, the forward pass computes all of them, and each rank receives the outputs of its part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel.replicas import Replicas
from smddp.modelparallel.pipeline import microbatching
from smddp.modelparallel.private_names import ENGINE, GRAPH_TASK
from smddp.modelparallel.ranks import Ranks
from smddp.modelparallel.tensor import batch as together


def call(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], prescaled: bool, ranks: Ranks
) -> Any:
    """Calls ``forward``. Collective over the tensor group.

    Args:
        forward: of a model whose layers the tensor group shares.
        args, kwargs: of this rank; tensors have the samples of the batch along their first dimension.
        prescaled: the ranks of the tensor group read the same batch.

    Raises ValueError if the batches of the ranks do not fit together.
    """
    if ranks.tp_size == 1:
        return forward(*args, **kwargs)
    own: dict[str, torch.Tensor] = {}

    def note(leaf: Any, name: str) -> Any:
        if isinstance(leaf, torch.Tensor):
            own[name] = leaf
        return leaf

    inputs = microbatching.each({**{f"argument {n}": each for n, each in enumerate(args)}, **kwargs}, note, "")
    seed = int(torch.randint(1 << 62, ()).item())
    given = {name: tensor.detach() for name, tensor in own.items()}
    given, seed, counts = together.united(given, seed, dict.fromkeys(own, 0), 1, prescaled, ranks)
    if not prescaled:
        for name, tensor in given.items():
            if own[name].requires_grad and torch.is_grad_enabled():
                given[name] = _Input.apply(own[name], tensor, counts, ranks)
        inputs = microbatching.each(inputs, lambda leaf, name: given.get(name, leaf), "")
    positional = [inputs.pop(f"argument {n}") for n in range(len(args))]
    with _seeded(seed):
        found = forward(*positional, **inputs)
    share = together.share(counts, ranks.tp_rank)
    return found if prescaled else _outputs(found, share, ranks)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of the forward pass, equal on all ranks of the tensor group."""
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(seed)
        yield


def _outputs(found: Any, share: together.Share, ranks: Ranks) -> Any:
    """Return this rank's samples of the outputs, whose gradients all ranks of the tensor group receive."""
    tensors: list[torch.Tensor] = []
    microbatching.each(found, lambda leaf, _: tensors.append(leaf) if _trained(leaf) else None, "")
    if not tensors:
        return share.mine([found])[0]
    mine = iter(_Outputs.apply(share, ranks, *tensors))
    return microbatching.each(found, lambda leaf, _: next(mine) if _trained(leaf) else share.mine([leaf])[0], "")


def _trained(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


class _Input(torch.autograd.Function):
    """Replaces this rank's tensor by that of all ranks. Backward: the gradient of this rank's loss."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, counts: dict[int, list[int]], ranks: Ranks) -> Any:
        parts = counts.get(whole.shape[0]) if whole.dim() else None
        ctx.place = None if parts is None else (sum(parts[: ranks.tp_rank]), parts[ranks.tp_rank])
        # The loss of the group is the mean of the losses of its ranks.
        ctx.scale = 1 if parts is None else ranks.tp_size
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        own = gradient if ctx.place is None else gradient.narrow(0, *ctx.place)
        return own * ctx.scale, None, None, None


class _Outputs(torch.autograd.Function):
    """This rank's part of the outputs. Backward: the mean of the gradients that the ranks of the group have."""

    @staticmethod
    def forward(ctx: Any, share: together.Share, ranks: Ranks, *tensors: torch.Tensor) -> Any:
        ctx.share, ctx.ranks, ctx.shapes = share, ranks, [tensor.shape for tensor in tensors]
        return tuple(share.mine([tensor])[0].clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        whole = []
        for shape, gradient in zip(ctx.shapes, gradients):
            place = ctx.share.of.get(shape[0]) if shape else None
            total = gradient.new_zeros(shape)
            (total if place is None else total.narrow(0, *place)).copy_(gradient)
            dist.all_reduce(total, group=ctx.ranks.tp_group)
            whole.append(total.div_(ctx.ranks.tp_size))
        return (None, None, *whole)


class Averaging:
    """Averages gradients over the replicas at the end of a backward pass outside of a step.

    Args:
        replicas: of this stage; None if there is one.
        fp16: the optimizer expects gradients of a loss that `model.backward` scales.
        ranks: of this process.
    """

    def __init__(self, replicas: Replicas | None, fp16: bool, ranks: Ranks) -> None:
        self._replicas, self._fp16 = replicas, fp16
        self._needed = replicas is not None or fp16 or ranks.tp_size > 1
        self._pass = -1

    def watch(self, found: Any) -> Any:
        """Returns the model's outputs ``found``, whose backward pass averages.

        Raises TypeError if the outputs hold no tensor that requires a gradient, but objects that may.
        """
        if self._needed:
            for name in (GRAPH_TASK, ENGINE):
                name.get()
        seen: list[bool] = []
        opaque: list[Any] = []

        def note(leaf: Any, _: str) -> Any:
            if _trained(leaf):
                leaf.register_hook(self._begin)
                seen.append(True)
            elif leaf is not None and not isinstance(leaf, (torch.Tensor, bool, int, float, str)):
                opaque.append(leaf)
            return leaf

        if self._needed:
            microbatching.each(found, note, "")
        if opaque and not seen:
            raise TypeError(
                f"the model returned a {type(opaque[0]).__name__} outside of a step: expected tensors in tuples, lists "
                "and dictionaries, whose backward pass averages the gradients over the replicas. Return these, or call "
                "the model in a function decorated with @smp.step"
            )
        return found

    def _begin(self, _: torch.Tensor) -> None:
        if self._fp16:
            raise RuntimeError(
                "loss.backward() outside of a step under 'fp16': expected a loss that model.backward(loss) scales. "
                "Call the model and model.backward(loss) in a function decorated with @smp.step"
            )
        number = GRAPH_TASK.get()()
        if self._replicas is None or number == self._pass:
            return
        self._pass = number
        self._replicas.begin(outcome_pending=False)
        ENGINE.queue_callback(self._replicas.end)
