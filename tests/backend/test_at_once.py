"""The short way of ordinary calls: taken by what it is right for, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from backend.oracle import same
from backend.ranks import on_ranks

TOLD_IN_C = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
WHY = "torch.Tensor has no __dlpack_c_exchange_api__ (2.15 has), so there is no short way"
needs_c = pytest.mark.skipif(not TOLD_IN_C, reason=WHY)
REDUCED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def at_once(cls: type = AllreduceOptions, **fields: Any) -> Any:
    options = cls()
    options.asyncOp = False
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


@needs_c
@on_ranks(2)
def test_ordinary_tensors_take_the_short_way_with_the_right_result():
    short, rank = dist.group.WORLD._at_once, dist.get_rank()
    for dtype in REDUCED:
        for op, result in [(ReduceOp.SUM, 6), (ReduceOp.AVG, 3), (ReduceOp.MAX, 4), (ReduceOp.MIN, 2)]:
            tensor = torch.full((3,), 2 + 2 * rank, dtype=dtype)
            assert short.all_reduce([tensor], at_once(reduceOp=op)), (dtype, op)
            same(tensor, torch.full((3,), result, dtype=dtype))
    flag = torch.tensor([rank == 1])
    assert short.all_reduce([flag], at_once(reduceOp=ReduceOp.MAX))
    assert flag.item()
    with torch.inference_mode():
        inference = ones(2)
    row = torch.arange(6.0).view(2, 3)[1]
    for tensor in [
        torch.nn.Parameter(ones(4)),
        ones(4, requires_grad=True),
        torch.tensor(5.0),
        row,
        ones(2, 3).as_strided((1, 3), (77, 1)),
        inference,
        ones(70_000),
    ]:
        before = tensor.detach().clone()
        assert short.all_reduce([tensor], at_once()), tensor
        same(tensor.detach(), before * 2)
    same(row, torch.tensor([6.0, 8.0, 10.0]))
    gathered = torch.empty(2, 3)
    assert short.all_gather(gathered, torch.full((3,), float(rank)), at_once(AllgatherOptions))
    same(gathered, torch.tensor([[0.0] * 3, [1.0] * 3]))
    scattered = torch.empty(2)
    assert short.reduce_scatter(scattered, torch.arange(4.0), at_once(ReduceScatterOptions))
    same(scattered, torch.tensor([0.0, 2.0]) if rank == 0 else torch.tensor([4.0, 6.0]))
    exchanged = torch.empty(4)
    assert short.all_to_all(exchanged, torch.arange(4.0) + 10 * rank, [], [], at_once(AllToAllOptions))
    same(exchanged, torch.tensor([0.0, 1.0, 10.0, 11.0]) + 2 * rank)
    for root in range(2):
        told = torch.full((3,), float(rank))
        assert short.broadcast([told], at_once(BroadcastOptions, rootRank=root))
        same(told, torch.full((3,), float(root)))


class Derived(torch.Tensor):
    """Of which nobody knows what its elements are."""


UNUSUAL: dict[str, Callable[[], torch.Tensor]] = {
    "negated": lambda: torch._neg_view(ones(3)),
    "conjugated": lambda: torch.complex(ones(3), ones(3)).conj(),
    "complex": lambda: torch.complex(ones(3), ones(3)),
    "transposed": lambda: ones(2, 3).T,
    "with gaps": lambda: ones(6)[::2],
    "empty": lambda: ones(0, 3),
    "derived": lambda: ones(3).as_subclass(Derived),
}


@needs_c
@on_ranks(2)
def test_what_is_not_plain_goes_the_long_way_with_the_right_result():
    short = dist.group.WORLD._at_once
    for name, make in UNUSUAL.items():
        tensor = make()
        before = tensor.clone()
        assert not short.all_reduce([tensor], at_once()), name
        dist.group.WORLD.allreduce([tensor], at_once())
        same(tensor.resolve_conj().resolve_neg(), (before * 2).resolve_conj().resolve_neg())
    freed = ones(3)
    freed.untyped_storage().resize_(0)
    for tensor in [freed, ones(3, device="meta"), torch.eye(3).to_sparse(), ones(3).to(torch.float8_e4m3fn)]:
        assert not short.all_reduce([tensor], at_once())
    seen = []
    torch.func.vmap(lambda part: (seen.append(short.all_reduce([part], at_once())), part)[1])(ones(2, 3))
    assert seen == [False]
    same(ones(3), ones(3))


@needs_c
@on_ranks(2)
def test_unusual_calls_go_the_long_way():
    short = dist.group.WORLD._at_once
    pair = ones(2), ones(1)
    for options in [
        at_once(asyncOp=True),
        at_once(timeout=timedelta(seconds=5)),
        at_once(reduceOp=ReduceOp.PRODUCT),
        at_once(reduceOp=ReduceOp.BAND),
    ]:
        assert not short.all_reduce([ones(2)], options)
    assert not short.all_reduce([ones(1), ones(1)], at_once())
    assert not short.all_reduce([torch.tensor([True])], at_once(reduceOp=ReduceOp.AVG))
    assert not short.all_reduce("no tensor", at_once())
    assert not short.all_reduce([5], at_once())
    assert not short.all_gather(ones(3), ones(1), at_once(AllgatherOptions))
    assert not short.all_gather(ones(2), ones(1).double(), at_once(AllgatherOptions))
    assert not short.reduce_scatter(*pair, at_once(ReduceScatterOptions))
    assert not short.broadcast([ones(1)], at_once(BroadcastOptions, rootRank=7))
    exchange = at_once(AllToAllOptions)
    assert not short.all_to_all(ones(4), ones(4), [1, 3], [1, 3], exchange)
    assert not short.all_to_all(ones(3), ones(3), [], [], exchange)
    assert not short.all_to_all(ones(1, 4), ones(1, 4), [], [], exchange)
    assert not short.all_to_all(ones(2), ones(4), [], [], exchange)
    group = dist.group.WORLD
    with dist._coalescing_manager(group, torch.device("cpu")):
        group.broadcast([ones(1)], at_once(BroadcastOptions))
        assert group._short_way() is None
    assert group._short_way() is short
    tensor = ones(2)
    dist.all_reduce(tensor)
    same(tensor, torch.full((2,), 2.0))
