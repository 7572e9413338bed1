"""Calls of torch.distributed as data: what a call is, which forms it has, and how a rank makes it.

Two calls match where their keys are the same, whatever form each rank uses; all others differ, and two ranks that make
them in one group are to be told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Below and above what travels with its header (8 KiB), in float32 elements of a block.
SMALL, LARGE = 4, 5_000


@dataclass(frozen=True)
class Call:
    """One call. key: what it is. form: in which of torch's ways. make: starts it on a group, as its rank there."""

    key: tuple[Any, ...]
    form: str
    make: Callable[[Any, bool], Any]

    def __str__(self) -> str:
        return f"{' '.join(map(_word, self.key))} ({self.form})"


def _word(part: Any) -> str:
    return str(part).removeprefix("torch.").replace(" ", "")


def tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def premul(factor: float) -> Any:
    return dist._make_nccl_premul_sum(factor)


def op_of(name: str) -> Any:
    word, _, factor = name.partition(":")
    return premul(float(factor)) if factor else getattr(dist.ReduceOp, word)


def world_rank(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def all_reduce(count: int, dtype: torch.dtype = torch.float32, op: str = "SUM", form: str = "flat") -> Call:
    def make(group: Any, later: bool) -> Any:
        data = tensor(count, dtype)
        if form == "shaped":
            data = data.view(1, count, 1)
        return dist.all_reduce(data, op_of(op), group, async_op=later)

    return Call(("all_reduce", count, dtype, op), form, make)


def reduce(count: int, root: int = 0, dtype: torch.dtype = torch.float32, op: str = "SUM") -> Call:
    def make(group: Any, later: bool) -> Any:
        return dist.reduce(tensor(count, dtype), world_rank(group, root), op_of(op), group, async_op=later)

    return Call(("reduce", count, dtype, op, f"root={root}"), "flat", make)


def broadcast(count: int, root: int = 0, dtype: torch.dtype = torch.float32, form: str = "flat") -> Call:
    def make(group: Any, later: bool) -> Any:
        data = tensor(count, dtype)
        if form == "strided":
            data = torch.stack((data, data), 1)[:, 0]
        return dist.broadcast(data, world_rank(group, root), group, async_op=later)

    return Call(("broadcast", count, dtype, f"root={root}"), form, make)


def gather(count: int, root: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    def make(group: Any, later: bool) -> Any:
        size = group.size()
        outputs = [tensor(count, dtype) for _ in range(size)] if group.rank() == root else None
        return dist.gather(tensor(count, dtype), outputs, world_rank(group, root), group, async_op=later)

    return Call(("gather", count, dtype, f"root={root}"), "list", make)


def scatter(count: int, root: int = 0, dtype: torch.dtype = torch.float32) -> Call:
    def make(group: Any, later: bool) -> Any:
        size = group.size()
        inputs = [tensor(count, dtype) for _ in range(size)] if group.rank() == root else None
        return dist.scatter(tensor(count, dtype), inputs, world_rank(group, root), group, async_op=later)

    return Call(("scatter", count, dtype, f"root={root}"), "list", make)


def all_gather(sizes: Sequence[int], dtype: torch.dtype = torch.float32, form: str = "list") -> Call:
    """sizes: of the blocks, by rank in the group."""
    sizes = tuple(sizes)

    def make(group: Any, later: bool) -> Any:
        mine = tensor(sizes[group.rank()], dtype)
        if form == "tensor":
            return dist.all_gather_into_tensor(tensor(sum(sizes), dtype), mine, group, async_op=later)
        return dist.all_gather([tensor(size, dtype) for size in sizes], mine, group, async_op=later)

    return Call(("all_gather", sizes, dtype), form, make)


def reduce_scatter(
    sizes: Sequence[int], dtype: torch.dtype = torch.float32, op: str = "SUM", form: str = "list"
) -> Call:
    """sizes: of the blocks, by rank in the group."""
    sizes = tuple(sizes)

    def make(group: Any, later: bool) -> Any:
        mine = tensor(sizes[group.rank()], dtype)
        if form == "tensor":
            return dist.reduce_scatter_tensor(mine, tensor(sum(sizes), dtype), op_of(op), group, async_op=later)
        inputs = [tensor(size, dtype) for size in sizes]
        return dist.reduce_scatter(mine, inputs, op_of(op), group, async_op=later)

    return Call(("reduce_scatter", sizes, dtype, op), form, make)


def all_to_all(sizes: Sequence[int], dtype: torch.dtype = torch.float32, form: str = "list") -> Call:
    """sizes: what every rank sends to each, by rank in the group."""
    sizes = tuple(sizes)

    def make(group: Any, later: bool) -> Any:
        mine = sizes[group.rank()]
        if form == "list":
            outputs = [tensor(mine, dtype) for _ in sizes]
            return dist.all_to_all(outputs, [tensor(size, dtype) for size in sizes], group, async_op=later)
        output, data = tensor(mine * len(sizes), dtype), tensor(sum(sizes), dtype)
        if form == "even":
            return dist.all_to_all_single(output, data, group=group, async_op=later)
        return dist.all_to_all_single(output, data, [mine] * len(sizes), list(sizes), group, async_op=later)

    return Call(("all_to_all", sizes, dtype), form, make)


def coalesced(counts: Sequence[int], dtype: torch.dtype = torch.float32) -> Call:
    """all_reduce of several tensors in one call."""

    def make(group: Any, later: bool) -> Any:
        work = group.allreduce_coalesced([tensor(count, dtype) for count in counts])
        return work if later else work.wait()

    return Call(("all_reduce_coalesced", tuple(counts), dtype), "list", make)


def barrier() -> Call:
    return Call(("barrier",), "plain", lambda group, later: dist.barrier(group, async_op=later))
