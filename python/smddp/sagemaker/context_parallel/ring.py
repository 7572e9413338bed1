"""Ring attention over all ranks' keys and values: cp_comm_type="p2p".

Ring attention (Liu et al., 2023) with the load balance of zigzag chunks: in step t a rank attends to what rank r - t
holds, while that goes on to the next rank and what rank r - t - 1 holds arrives. Outputs are put together by a running
log-sum-exp, so that no rank ever holds the keys of more than two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from smddp.sagemaker.context_parallel.kernels import Scores, attend, attend_backward, merge
from smddp.sagemaker.context_parallel.masks import Mask


class Ring:
    """Ring exchange of tensors with the neighbouring ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._before = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def source(self, step: int) -> int:
        """Returns the rank whose tensors are present after ``step`` steps."""
        return (self.rank - step) % self.size

    def start(self, *tensors: torch.Tensor) -> Passing:
        """Start to send ``tensors`` to the next rank and to receive the previous rank's tensors."""
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = []
        for tensor, into in zip(tensors, received):
            operations.append(dist.P2POp(dist.isend, tensor, self._next, self.group))
            operations.append(dist.P2POp(dist.irecv, into, self._before, self.group))
        return Passing(tensors, received, dist.batch_isend_irecv(operations))


class Passing:
    """Pending ring transfer; keeps the sent tensors until completion."""

    def __init__(self, sent: tuple[torch.Tensor, ...], received: list[torch.Tensor], works: list[Any]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        return self._received


class _Pair:
    """Packing of keys and values into one buffer."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self._shapes = key.shape, value.shape
        self._sizes = [key.numel(), value.numel()]

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([key.flatten(), value.flatten()])

    def unpack(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = buffer.split(self._sizes)
        return key.view(self._shapes[0]), value.view(self._shapes[1])


class RingAttention(torch.autograd.Function):
    """(b, h, s, d), (b, g, s, d), (b, g, s, e) of this rank's tokens -> (b, h, s, e).

    ``sinks``: None, or a logit (h,) for each head that takes part in its softmax and has no value.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        mask: Mask,
        scores: Scores,
    ) -> torch.Tensor:
        ring, pair = Ring(mask.tokens.group), _Pair(key, value)
        shape = *query.shape[:3], value.shape[-1]
        out = query.new_zeros(shape, dtype=torch.float32)
        lse = query.new_full(shape[:3], float("-inf"), dtype=torch.float32)
        here = pair.pack(key, value)
        for step in range(ring.size):
            # The next keys are under way while these are attended to.
            passing = ring.start(here) if step + 1 < ring.size else None
            keys, values = pair.unpack(here)
            for rows, columns, visible in mask.pieces(ring.source(step)):
                part = attend(query[:, :, rows], keys[:, :, columns], values[:, :, columns], visible, scores)
                merge(out[:, :, rows], lse[:, :, rows], *part)
            if passing is not None:
                (here,) = passing.wait()
        if sinks is not None:
            share = sinks.float().view(1, -1, 1)
            out *= torch.sigmoid(lse - share).unsqueeze(-1)
            lse = torch.logaddexp(lse, share)
        out = out.to(value.dtype)
        ctx.save_for_backward(query, key, value, out, lse, *(() if sinks is None else (sinks,)))
        ctx.mask, ctx.scores = mask, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, *sinks = ctx.saved_tensors
        mask, scores = ctx.mask, ctx.scores
        ring, pair = Ring(mask.tokens.group), _Pair(key, value)
        delta = (grad.float() * out.float()).sum(-1)
        of_query = torch.zeros_like(query, dtype=torch.float32)

        def of_keys(buffer: torch.Tensor, source: int) -> torch.Tensor:
            """Computes this rank's gradients of ``source``'s keys and values; adds to ``of_query``."""
            keys, values = pair.unpack(buffer)
            of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
            for rows, columns, visible in mask.pieces(source):
                part = attend_backward(
                    grad[:, :, rows],
                    delta[:, :, rows],
                    lse[:, :, rows],
                    query[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    visible,
                    scores,
                )
                of_query[:, :, rows] += part[0]
                of_key[:, :, columns] += part[1].to(of_key.dtype)
                of_value[:, :, columns] += part[2].to(of_value.dtype)
            return pair.pack(of_key, of_value)

        # Gradients follow their keys around the ring: those of rank s's keys start at rank s + 1 and return to
        # rank s after cp - 1 steps, with each rank's contribution.
        here, own = pair.pack(key, value), None
        found: torch.Tensor | None = None
        for step in range(ring.size):
            leaving = [here] if step + 1 < ring.size else []
            if found is not None:
                leaving.append(found)
            passing = ring.start(*leaving) if leaving else None
            grads = of_keys(here, ring.source(step))
            arrived = passing.wait() if passing is not None else []
            if step == 0:
                own = grads
            else:
                # Received after the keys: the partial gradients accumulated by the previous ranks.
                found = grads + arrived[-1] if found is not None else grads
            if step + 1 < ring.size:
                here = arrived[0]
        assert own is not None  # a ring has a rank
        if found is not None:
            own = own + ring.start(found).wait()[0]
        of_key, of_value = pair.unpack(own)
        of_sinks = None
        if sinks:
            weight = torch.exp(sinks[0].float().view(1, -1, 1) - lse)
            of_sinks = -(weight * delta).sum((0, 2)).to(sinks[0].dtype)
        return of_query.to(query.dtype), of_key, of_value, of_sinks, None, None
