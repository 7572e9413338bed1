"""Dispatch of tokens to the ranks that hold their experts, and combination of the results.

A dispatcher takes this rank's tokens with their chosen experts, and returns the rows for this rank's experts. It sends
a token once to each rank that holds any of its experts (between nodes, once to each node). That rank returns one row,
the sum of the expert outputs by the router's weights.
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
    """Rows that this rank's experts compute.

    Attributes:
        rows: (rows, hidden).
        experts: (rows, k), local expert indices; -1 for experts of other ranks.
        weights: (rows, k), the router's.
        back: function from the experts' sums, (rows, hidden), to the outputs of this rank's tokens, (tokens, hidden).
    """

    rows: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    back: Callable[[torch.Tensor], torch.Tensor]


class Dispatcher(abc.ABC):
    """Dispatch over the ranks of ``group`` with ``here`` experts each: rank r holds those from index r * here on."""

    def __init__(self, group: ExpertGroup, here: int) -> None:
        self.group, self.here = group, here

    @abc.abstractmethod
    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        """Sends (tokens, hidden) with the chosen experts and their weights, both (tokens, k). Collective."""


class Alone(Dispatcher):
    """All experts are on this rank."""

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        return Arrived(tokens, chosen, weights, lambda sums: sums)


class AllToAll(Dispatcher):
    """Dispatch of each token to the ranks of its experts by an uneven all-to-all, after an exchange of row counts."""

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        return _sent(tokens, chosen, weights, self.group.process_group, self.here)


class NodeByNode(Dispatcher):
    """Hierarchical `AllToAll`: one message per token and remote node, to the rank with the same index on its node.

    That rank forwards the token within the node, sums the outputs of the node's experts in the order of their ranks,
    and returns one row. (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.2.)
    """

    def __init__(self, group: ExpertGroup, here: int, hierarchy: Hierarchy) -> None:
        super().__init__(group, here)
        self.between, self.within = hierarchy.between, hierarchy.within

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        node, on_node = self.between.rank(), self.within.size() * self.here
        received = _sent(tokens, chosen, weights, self.between, on_node, leave_out=node)
        own = _from(chosen, node * on_node, on_node)
        arrived = _sent(
            torch.cat([tokens, received.rows]),
            torch.cat([own, received.experts]),
            torch.cat([weights, received.weights]),
            self.within,
            self.here,
        )

        def back(sums: torch.Tensor) -> torch.Tensor:
            mine, theirs = arrived.back(sums).split([len(tokens), len(received.rows)])
            return mine + received.back(theirs)

        return Arrived(arrived.rows, arrived.experts, arrived.weights, back)


def _sent(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    group: dist.ProcessGroup,
    here: int,
    leave_out: int | None = None,
) -> Arrived:
    """Sends each token to the members of ``group`` that hold any of its experts, ``here`` each, except ``leave_out``.

    Ignores experts of -1.
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
    """Returns ``chosen`` relative to expert ``first``; -1 for experts outside the ``here`` experts from there."""
    inside = (chosen >= first) & (chosen < first + here)
    return torch.where(inside, chosen - first, -1).to(torch.int32)


class AllGather(Dispatcher):
    """Dispatch of every token to every rank by an all-gather; a reduce-scatter returns the sums."""

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
    """Shuffle before the dispatch: each rank sends an equal part of its tokens to every other rank.

    So all ranks send similar amounts, even if all samples of one rank choose the same experts. Results do not change.
    """

    def __init__(self, inner: Dispatcher, seed: int) -> None:
        super().__init__(inner.group, inner.here)
        self.inner, self.seed = inner, seed

    def send(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Arrived:
        group, count = self.group.process_group, len(tokens)
        # A fixed order in every pass: a recomputed layer must repeat its messages.
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
    """Splits 0 to ``count`` into ``parts`` ranges whose lengths differ by at most one."""
    ends = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def _counts(send: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Returns the numbers of rows to send to each rank and to receive from each rank."""
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send.contiguous(), group=group)
    to, from_ = torch.stack([send, receive]).tolist()  # one device synchronization
    return to, from_


def dispatcher(group: ExpertGroup, here: int, by_all_to_all: bool, shuffle_seed: int | None) -> Dispatcher:
    """Returns the dispatcher that a `MoEConfig` selects; ``shuffle_seed`` None disables the shuffle."""
    if group.size == 1:
        return Alone(group, here)
    made: Dispatcher = AllGather(group, here)
    if by_all_to_all:
        made = AllToAll(group, here) if group.hierarchy is None else NodeByNode(group, here, group.hierarchy)
    return made if shuffle_seed is None else Shuffled(made, shuffle_seed)
