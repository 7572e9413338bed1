"""Calls of torch.distributed as data: their key, their form, how a rank makes them, and the expected results.

Two calls match if their keys are equal, in any form. All others differ, and ranks that make them in one group must
get a MismatchError.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Below and above the inline message limit (8 KiB), in float32 elements of a block.
SMALL, LARGE = 4, 5_000

# The call's work, its result tensors, and their expected values.
Started = tuple[Any, list[torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class Call:
    """One call. key: its identity. form: the variant of torch's API. begin: starts it on a group as this rank."""

    key: tuple[Any, ...]
    form: str
    begin: Callable[[Any, bool], Started]

    def make(self, group: Any, later: bool) -> Any:
        return self.begin(group, later)[0]

    def __str__(self) -> str:
        return f"{' '.join(map(_word, self.key))} ({self.form})"


def _word(part: Any) -> str:
    return str(part).removeprefix("torch.").replace(" ", "")


def of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the contribution of a rank."""
    return torch.full((count,), rank + 1, dtype=dtype)


def folded(op: str, size: int) -> float:
    """Returns one element of the reduction of all contributions."""
    given = range(1, size + 1)
    word, _, factor = op.partition(":")
    by = {"PRODUCT": operator.mul, "MIN": min, "MAX": max, "BAND": operator.and_, "BOR": operator.or_}
    by |= {"BXOR": operator.xor}
    if word in by:
        return functools.reduce(by[word], given)
    return sum(given) * (float(factor) if factor else 1 / size if word == "AVG" else 1)


def premul(factor: float) -> Any:
    return dist._make_nccl_premul_sum(factor)


def op_of(name: str) -> Any:
    word, _, factor = name.partition(":")
    return premul(float(factor)) if factor else getattr(dist.ReduceOp, word)


def world_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def all_reduce(count: int, dtype: torch.dtype = torch.float32, op: str = "SUM", form: str = "flat") -> Call:
    def begin(group: Any, later: bool) -> Started:
        data = of(group.rank(), count, dtype)
        if form == "shaped":
            data = data.view(1, count, 1)
        work = dist.all_reduce(data, op_of(op), group, async_op=later)
        return work, [data], [torch.full_like(data, folded(op, group.size()))]

    return Call(("all_reduce", count, dtype, op), form, begin)


def reduce(count: int, root: int = 0, dtype: torch.dtype = torch.float32, op: str = "SUM") -> Call:
    def begin(group: Any, later: bool) -> Started:
        data = of(group.rank(), count, dtype)
        work = dist.reduce(data, world_rank(group, root), op_of(op), group, async_op=later)
        found = [data] if group.rank() == root else []
        return work, found, [torch.full_like(each, folded(op, group.size())) for each in found]

    return Call(("reduce", count, dtype, op, f"root={root}"), "flat", begin)


def broadcast(count: int, root: int = 0, dtype: torch.dtype = torch.float32, form: str = "flat") -> Call:
    def begin(group: Any, later: bool) -> Started:
        data = of(group.rank(), count, dtype)
        if form == "strided":
            data = torch.stack((data, data), 1)[:, 0]
        work = dist.broadcast(data, world_rank(group, root), group, async_op=later)
        return work, [data], [of(root, count, dtype)]

    return Call(("broadcast", count, dtype, f"root={root}"), form, begin)


def gather(count: int, root: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    def begin(group: Any, later: bool) -> Started:
        ranks = range(group.size()) if group.rank() == root else []
        found = [torch.empty(count, dtype=dtype) for _ in ranks]
        mine = of(group.rank(), count, dtype)
        work = dist.gather(mine, found or None, world_rank(group, root), group, async_op=later)
        return work, found, [of(rank, count, dtype) for rank in ranks]

    return Call(("gather", count, dtype, f"root={root}"), "list", begin)


def scatter(count: int, root: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    def begin(group: Any, later: bool) -> Started:
        found = torch.empty(count, dtype=dtype)
        inputs = [of(rank, count, dtype) for rank in range(group.size())] if group.rank() == root else None
        work = dist.scatter(found, inputs, world_rank(group, root), group, async_op=later)
        return work, [found], [of(group.rank(), count, dtype)]

    return Call(("scatter", count, dtype, f"root={root}"), "list", begin)


def all_gather(sizes: Sequence[int], dtype: torch.dtype = torch.float32, form: str = "list") -> Call:
    """sizes: of the blocks, by rank in the group."""
    sizes = tuple(sizes)

    def begin(group: Any, later: bool) -> Started:
        mine = of(group.rank(), sizes[group.rank()], dtype)
        right = [of(rank, size, dtype) for rank, size in enumerate(sizes)]
        if form == "tensor":
            found = torch.empty(sum(sizes), dtype=dtype)
            return dist.all_gather_into_tensor(found, mine, group, async_op=later), [found], [torch.cat(right)]
        outputs = [torch.empty_like(each) for each in right]
        return dist.all_gather(outputs, mine, group, async_op=later), outputs, right

    return Call(("all_gather", sizes, dtype), form, begin)


def reduce_scatter(
    sizes: Sequence[int], dtype: torch.dtype = torch.float32, op: str = "SUM", form: str = "list"
) -> Call:
    """sizes: of the blocks, by rank in the group."""
    sizes = tuple(sizes)

    def begin(group: Any, later: bool) -> Started:
        found = torch.empty(sizes[group.rank()], dtype=dtype)
        given = of(group.rank(), sum(sizes), dtype)
        if form == "tensor":
            work = dist.reduce_scatter_tensor(found, given, op_of(op), group, async_op=later)
        else:
            work = dist.reduce_scatter(found, list(given.split(sizes)), op_of(op), group, async_op=later)
        return work, [found], [torch.full_like(found, folded(op, group.size()))]

    return Call(("reduce_scatter", sizes, dtype, op), form, begin)


def all_to_all(sizes: Sequence[int], dtype: torch.dtype = torch.float32, form: str = "list") -> Call:
    """sizes: elements that every rank sends to each rank of the group."""
    sizes = tuple(sizes)

    def begin(group: Any, later: bool) -> Started:
        mine = sizes[group.rank()]
        given = of(group.rank(), sum(sizes), dtype)
        right = [of(rank, mine, dtype) for rank in range(len(sizes))]
        if form == "list":
            outputs = [torch.empty_like(each) for each in right]
            return dist.all_to_all(outputs, list(given.split(sizes)), group, async_op=later), outputs, right
        found = torch.empty(mine * len(sizes), dtype=dtype)
        splits = () if form == "even" else ([mine] * len(sizes), list(sizes))
        work = dist.all_to_all_single(found, given, *splits, group=group, async_op=later)
        return work, [found], [torch.cat(right)]

    return Call(("all_to_all", sizes, dtype), form, begin)


def coalesced(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> Call:
    """all_reduce of several tensors in one call."""

    def begin(group: Any, later: bool) -> Started:
        found = [of(group.rank(), count, dtype) for count in counts]
        work = group.allreduce_coalesced(found)
        right = [torch.full_like(each, folded("SUM", group.size())) for each in found]
        return work if later else work.wait(), found, right

    return Call(("all_reduce_coalesced", tuple(counts), dtype), "list", begin)


def barrier() -> Call:
    return Call(("barrier",), "plain", lambda group, later: (dist.barrier(group, async_op=later), [], []))
