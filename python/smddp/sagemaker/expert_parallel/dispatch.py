"""Which token goes to which rank, and the way back.

A dispatcher takes this rank's tokens with the experts that their router chose, and gives the rows that this rank's
experts compute. A token travels once to each rank that holds any of its experts (between nodes, once to each node);
what they make of it comes back as one row, the sum by the router's weights.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smddp.sagemaker.autograd_collectives import all_to_all, exchange, gather, gathered, scatter
from smddp.sagemaker.expert_parallel.group import ExpertGroup
from smddp.sagemaker.parallel import Hierarchy


@dataclass(frozen=True)
class Arrived:
    """What this rank's experts have to do.

    Attributes:
        rows: (rows, hidden).
        experts: (rows, k), this rank's experts counted from 0; -1 where the choice lies on another rank.
        weights: (rows, k), the router's.
        back: the experts' sums, (rows, hidden) -> what this rank's own tokens get, (tokens, hidden).
    """

    rows: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    back: Callable[[torch.Tensor], torch.Tensor]


class Dispatcher(abc.ABC):
    """How tokens reach the ranks of ``group``, each of which holds ``here`` experts: rank r those from r * here on."""

    def __init__(self, group: ExpertGroup, here: int) -> None:
        self.group, self.here = group, here

    @abc.abstractmethod
    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        """Collective over the group: (tokens, hidden), the experts chosen (tokens, k) and their weights (tokens, k)."""


class Alone(Dispatcher):
    """All experts are on this rank."""

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        return Arrived(tokens, chosen, weights, lambda sums: sums)


class AllToAll(Dispatcher):
    """Each token to the ranks that hold its experts, by an uneven all-to-all; the numbers of rows go ahead."""

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        return _sent(tokens, chosen, weights, self.group.process_group, self.here)


class NodeByNode(Dispatcher):
    """As `AllToAll`, but once to each other node that holds any of its experts: to the rank there in this one's place.

    From that rank it goes on within the node. What the node's experts make of it is summed there, in the order of
    their ranks, and comes back as one row. (As in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2.)
    """

    def __init__(self, group: ExpertGroup, here: int, hierarchy: Hierarchy) -> None:
        super().__init__(group, here)
        self.between, self.within = hierarchy.between, hierarchy.within

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        node, on_node = self.between.rank(), self.within.size() * self.here
        came = _sent(tokens, chosen, weights, self.between, on_node, leave_out=node)
        own = _from(chosen, node * on_node, on_node)
        arrived = _sent(
            torch.cat([tokens, came.rows]),
            torch.cat([own, came.experts]),
            torch.cat([weights, came.weights]),
            self.within,
            self.here,
        )

        def back(sums: torch.Tensor) -> torch.Tensor:
            mine, theirs = arrived.back(sums).split([len(tokens), len(came.rows)])
            return mine + came.back(theirs)

        return Arrived(arrived.rows, arrived.experts, arrived.weights, back)


def _sent(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    group: dist.ProcessGroup,
    here: int,
    leave_out: int | None = None,
) -> Arrived:
    """Each token to the members of ``group`` that hold any of its experts, ``here`` each; to ``leave_out`` nothing.

    An expert of -1 is none.
    """
    home = chosen.div(here, rounding_mode="floor")
    needed = torch.zeros(len(tokens), 1 + group.size(), dtype=torch.bool, device=tokens.device)
    needed = needed.scatter_(1, home.long() + 1, True)[:, 1:]
    if leave_out is not None:
        needed[:, leave_out] = False
    rank, token = needed.T.nonzero(as_tuple=True)
    to, from_ = _counts(needed.sum(0), group)
    experts = all_to_all(_from(chosen[token], rank[:, None] * here, here), to, from_, group)
    rows = exchange(tokens[token], to, from_, group)
    arrived = exchange(weights[token], to, from_, group)

    def back(sums: torch.Tensor) -> torch.Tensor:
        returned = exchange(sums, from_, to, group)
        return torch.zeros_like(tokens).index_add(0, token, returned)

    return Arrived(rows, experts, arrived, back)


def _from(chosen: torch.Tensor, first: torch.Tensor | int, here: int) -> torch.Tensor:
    """``chosen`` counted from expert ``first`` on; -1 where it is none of the ``here`` from there."""
    inside = (chosen >= first) & (chosen < first + here)
    return torch.where(inside, chosen - first, -1).to(torch.int32)


class AllGather(Dispatcher):
    """Every token to every rank, by an all-gather, and the sums back by a reduce-scatter."""

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        group, count = self.group.process_group, len(tokens)
        most = torch.tensor([count], device=tokens.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        missing = int(most) - count
        if missing:  # a reduce-scatter takes equal parts
            tokens, weights = (torch.cat([t, t.new_zeros(missing, t.shape[1])]) for t in (tokens, weights))
            chosen = torch.cat([chosen, chosen.new_full((missing, chosen.shape[1]), -1)])
        experts = _from(gathered(chosen, group), group.rank() * self.here, self.here)

        def back(sums: torch.Tensor) -> torch.Tensor:
            return scatter(sums, group)[:count]

        return Arrived(gather(tokens, group), experts, gather(weights, group), back)


class Shuffled(Dispatcher):
    """Tokens change ranks before they are dispatched: each rank gives every other an equal part of its own.

    So the ranks send alike even where one's samples all ask for the same experts. No result changes by it.
    """

    def __init__(self, inner: Dispatcher, seed: int) -> None:
        super().__init__(inner.group, inner.here)
        self.inner, self.seed = inner, seed

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        group, count = self.group.process_group, len(tokens)
        # The same order in every pass, as a recomputed layer must send what it sent before.
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)).to(tokens.device)
        parts = torch.tensor([len(part) for part in range_split(count, group.size())], device=tokens.device)
        to, from_ = _counts(parts, group)
        moved = self.inner.send(
            exchange(tokens[order], to, from_, group),
            all_to_all(chosen[order], to, from_, group),
            exchange(weights[order], to, from_, group),
        )

        def back(sums: torch.Tensor) -> torch.Tensor:
            returned = exchange(moved.back(sums), from_, to, group)
            return torch.zeros_like(tokens).index_add(0, order, returned)

        return Arrived(moved.rows, moved.experts, moved.weights, back)


def range_split(count: int, parts: int) -> list[range]:
    """0 to ``count`` in ``parts`` ranges whose lengths differ by one at most."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _counts(send: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come from each."""
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send.contiguous(), group=group)
    to, from_ = torch.stack([send, receive]).tolist()  # the device is asked once
    return to, from_


def dispatcher(group: ExpertGroup, here: int, by_all_to_all: bool, shuffle_seed: int | None) -> Dispatcher:
    """The dispatcher that a `MoEConfig` asks for; ``shuffle_seed`` None: tokens are not shuffled."""
    if group.size == 1:
        return Alone(group, here)
    made: Dispatcher = AllGather(group, here)
    if by_all_to_all:
        made = AllToAll(group, here) if group.hierarchy is None else NodeByNode(group, here, group.hierarchy)
    return made if shuffle_seed is None else Shuffled(made, shuffle_seed)
