"""Averaging of a stage's gradients over its replicas, overlapped with the last microbatch.

Buckets hold parameters in reverse model order, which approximates the order of the backward pass. A bucket is reduced
once its gradients are final and the previous bucket was started, so all replicas send buckets in the same order. Each
parameter carries a flag that is one if it has a gradient. As with DDP, a gradient missing on some replicas counts as
zero there. A parameter without a gradient on every replica keeps none.

The replicas exchange the outcome at the end of a step, so a failure in one pipeline ends the step in all.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("smddp.modelparallel")

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)

# Size of a failure report between replicas, in bytes.
_TEXT = 4096
# Time that a failed pipeline waits for the other replicas to receive its report before it raises.
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.002


class _Bucket:
    """Gradients that one call sums."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.open = len(parameters)
        self.flat = torch.empty(0)
        self.work: dist.Work | None = None

    def leave(self, group: dist.ProcessGroup) -> None:
        like = self.parameters[0]
        pieces = [torch.zeros_like(q) if q.grad is None else q.grad for q in self.parameters]
        used = torch.tensor([float(q.grad is not None) for q in self.parameters], dtype=like.dtype, device=like.device)
        self.flat = torch.cat([*(piece.reshape(-1) for piece in pieces), used])
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def arrive(self, replicas: int) -> None:
        """Set the gradient of each parameter to the mean, once the sum is complete."""
        assert self.work is not None  # it has left
        self.work.wait()
        sizes = [q.numel() for q in self.parameters]
        *sums, used = self.flat.split([*sizes, len(sizes)])
        for parameter, total, count in zip(self.parameters, sums, used.tolist()):
            if not count:
                continue
            mean = (total / replicas).view_as(parameter)
            if parameter.grad is None:
                parameter.grad = mean
            else:
                parameter.grad.copy_(mean)

    def reset(self) -> None:
        self.open, self.work, self.flat = len(self.parameters), None, torch.empty(0)


def buckets(tensors: Iterable[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    """Group consecutive parameters of one dtype and device, up to ``limit`` bytes or one larger tensor."""
    held: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if held and (size + own > limit or (tensor.dtype, tensor.device) != (held[0].dtype, held[0].device)):
            yield held
            held, size = [], 0
        held.append(tensor)
        size += own
    if held:
        yield held


class Replicas:
    """Gradient buckets of a stage, and the outcome of each step.

    Args:
        parameters: parameters of this stage.
        group: process group of this stage on all replicas.
        bucket_bytes: maximum bytes of one call, except for a larger parameter.
        overlap: reduce buckets during the last microbatch's backward pass; else after it.

    Attributes:
        outcome_pending: the other replicas wait for the outcome of this one.
        early: number of buckets sent during the last step's backward pass.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int, overlap: bool
    ) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = [_Bucket(together) for together in buckets(trained[::-1], bucket_bytes)]
        self._bucket_of = {id(q): bucket for bucket in self._buckets for q in bucket.parameters}
        self._device = trained[0].device if trained else torch.device("cpu")
        self._final: set[int] = set()
        self._next = 0
        self._left: list[dist.Work] = []
        # Accumulations of each parameter's gradient per backward pass of its segment: current, and expected.
        self._added: Counter[int] = Counter()
        self._usual: dict[int, int] = {}
        self._awaited: set[int] = set()
        self.outcome_pending = False
        self.early = 0
        self._overlap = overlap
        if overlap:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    # ---- during the step ----

    def begin(self, outcome_pending: bool) -> None:
        """Start a step. ``outcome_pending``: the replicas exchange its outcome even without a backward pass."""
        left, self._left = self._left, []
        for work in left:  # of a step that failed
            work.wait()
        for bucket in self._buckets:
            bucket.reset()
        self._final.clear()
        self._next = self.early = 0
        self.outcome_pending = outcome_pending

    @contextlib.contextmanager
    def watching(self, final: list[nn.Parameter]) -> Iterator[None]:
        """Context for the backward pass of one segment, which completes the gradients of ``final``."""
        if not self._overlap:
            final = []
        self._added.clear()
        self._awaited = {id(parameter) for parameter in final}
        yield
        self._usual.update(self._added)
        for parameter in final:
            self._ready(parameter)
        self._awaited = set()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Count an accumulation of autograd into the gradient of ``parameter``."""
        number = id(parameter)
        self._added[number] += 1
        if number in self._final:
            raise RuntimeError(
                "a gradient is added to after it was sent to the replicas: modules differ in how often a backward pass "
                "reaches their parameters. smp.DistributedModel(model, overlapping_allreduce=False) waits for the end"
            )
        if number in self._awaited and self._added[number] == self._usual.get(number):
            self._ready(parameter)

    def _ready(self, parameter: torch.Tensor) -> None:
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or id(parameter) in self._final:
            return
        self._final.add(id(parameter))
        bucket.open -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].open:
            self._leave()
            self.early += 1

    def _leave(self) -> None:
        with torch.no_grad():
            self._buckets[self._next].leave(self._group)
        self._next += 1

    # ---- its end ----

    def end(self) -> None:
        """Set the gradient of each parameter to the mean. Collective.

        Raises RuntimeError with the report of the failed replica if the step failed on another one.
        """
        self.outcome_pending = False
        while self._next < len(self._buckets):
            self._leave()
        self.agree()
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.arrive(self._size)
        # A backward pass outside of a step may follow.
        self._final.clear()

    def agree(self) -> None:
        """Exchange the outcome of the step, and raise if a replica failed. Collective."""
        self.outcome_pending = False
        failed = torch.zeros(1, dtype=torch.int32, device=self._device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group)
        if not failed.item():
            return
        work, texts = self._exchange_outcome("")
        work.wait()
        self._left += [bucket.work for bucket in self._buckets if bucket.work is not None]
        reports = [(number, bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")) for number, text in texts]
        raise RuntimeError(
            "; ".join(f"the step failed on replica {number}: {text}" for number, text in reports if text)
        )

    def fail(self, error: BaseException) -> None:
        """Report a failed step to the other replicas, which receive it at the end of their step.

        Operations that do not complete within two seconds remain pending, and the next step waits for them.
        """
        self.outcome_pending = False
        try:
            while self._next < len(self._buckets):
                self._leave()
            failed = torch.ones(1, dtype=torch.int32, device=self._device)
            self._left = [bucket.work for bucket in self._buckets if bucket.work is not None]
            self._left.append(dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._group, async_op=True))
            self._left.append(self._exchange_outcome(f"{type(error).__name__}: {error}")[0])
            until = time.monotonic() + _REPORT_SECONDS
            while time.monotonic() < until and not all(work.is_completed() for work in self._left):
                time.sleep(_LOOK_SECONDS)
        except Exception as trouble:  # the caller raises the first error
            log.warning("cannot report the failed step to the other replicas: %s", trouble)

    def _exchange_outcome(self, text: str) -> tuple[dist.Work, list[tuple[int, torch.Tensor]]]:
        """Exchange the error text of the step; empty on success."""
        mine = torch.zeros(_TEXT, dtype=torch.uint8)
        said = text.encode()[:_TEXT]
        mine[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        mine = mine.to(self._device)
        texts = [torch.zeros_like(mine) for _ in range(self._size)]
        work = dist.all_gather(texts, mine, group=self._group, async_op=True)
        return work, list(enumerate(texts))
