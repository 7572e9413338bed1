"""The fast path of ordinary calls: which calls it accepts, and which it leaves to Python."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from backend.oracle import same

HAS_C_API = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
WHY = "the fast path needs torch.Tensor.__dlpack_c_exchange_api__ (torch 2.11)"
needs_c = pytest.mark.skipif(not HAS_C_API, reason=WHY)
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


def sync_options(cls: type = AllreduceOptions, **fields: Any) -> Any:
    options = cls()
    options.asyncOp = False
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


@needs_c
@on_ranks(2)
def test_ordinary_tensors_use_the_fast_path_with_the_right_result():
    path, rank = dist.group.WORLD._fast_path, dist.get_rank()
    for dtype in REDUCED:
        for op, result in [(ReduceOp.SUM, 6), (ReduceOp.AVG, 3), (ReduceOp.MAX, 4), (ReduceOp.MIN, 2)]:
            tensor = torch.full((3,), 2 + 2 * rank, dtype=dtype)
            assert path.all_reduce([tensor], sync_options(reduceOp=op)), (dtype, op)
            same(tensor, torch.full((3,), result, dtype=dtype))
    flag = torch.tensor([rank == 1])
    assert path.all_reduce([flag], sync_options(reduceOp=ReduceOp.MAX))
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
        assert path.all_reduce([tensor], sync_options()), tensor
        same(tensor.detach(), before * 2)
    same(row, torch.tensor([6.0, 8.0, 10.0]))
    gathered = torch.empty(2, 3)
    assert path.all_gather(gathered, torch.full((3,), float(rank)), sync_options(AllgatherOptions))
    same(gathered, torch.tensor([[0.0] * 3, [1.0] * 3]))
    scattered = torch.empty(2)
    assert path.reduce_scatter(scattered, torch.arange(4.0), sync_options(ReduceScatterOptions))
    same(scattered, torch.tensor([0.0, 2.0]) if rank == 0 else torch.tensor([4.0, 6.0]))
    exchanged = torch.empty(4)
    assert path.all_to_all(exchanged, torch.arange(4.0) + 10 * rank, [], [], sync_options(AllToAllOptions))
    same(exchanged, torch.tensor([0.0, 1.0, 10.0, 11.0]) + 2 * rank)
    for root in range(2):
        sent = torch.full((3,), float(rank))
        assert path.broadcast([sent], sync_options(BroadcastOptions, rootRank=root))
        same(sent, torch.full((3,), float(root)))


class Derived(torch.Tensor):
    """A subclass, which the fast path declines."""


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
def test_other_tensors_use_the_python_path_with_the_right_result():
    path = dist.group.WORLD._fast_path
    for name, make in UNUSUAL.items():
        tensor = make()
        before = tensor.clone()
        assert not path.all_reduce([tensor], sync_options()), name
        dist.group.WORLD.allreduce([tensor], sync_options())
        same(tensor.resolve_conj().resolve_neg(), (before * 2).resolve_conj().resolve_neg())
    freed = ones(3)
    freed.untyped_storage().resize_(0)
    for tensor in [freed, ones(3, device="meta"), torch.eye(3).to_sparse(), ones(3).to(torch.float8_e4m3fn)]:
        assert not path.all_reduce([tensor], sync_options())
    seen = []
    torch.func.vmap(lambda part: (seen.append(path.all_reduce([part], sync_options())), part)[1])(ones(2, 3))
    assert seen == [False]
    same(ones(3), ones(3))


@needs_c
@on_ranks(2)
def test_unusual_calls_use_the_python_path():
    path = dist.group.WORLD._fast_path
    pair = ones(2), ones(1)
    for options in [
        sync_options(asyncOp=True),
        sync_options(timeout=timedelta(seconds=5)),
        sync_options(reduceOp=ReduceOp.PRODUCT),
        sync_options(reduceOp=ReduceOp.BAND),
    ]:
        assert not path.all_reduce([ones(2)], options)
    assert not path.all_reduce([ones(1), ones(1)], sync_options())
    assert not path.all_reduce([torch.tensor([True])], sync_options(reduceOp=ReduceOp.AVG))
    assert not path.all_reduce("no tensor", sync_options())
    assert not path.all_reduce([5], sync_options())
    assert not path.all_gather(ones(3), ones(1), sync_options(AllgatherOptions))
    assert not path.all_gather(ones(2), ones(1).double(), sync_options(AllgatherOptions))
    assert not path.reduce_scatter(*pair, sync_options(ReduceScatterOptions))
    assert not path.broadcast([ones(1)], sync_options(BroadcastOptions, rootRank=7))
    exchange = sync_options(AllToAllOptions)
    assert not path.all_to_all(ones(4), ones(4), [1, 3], [1, 3], exchange)
    assert not path.all_to_all(ones(3), ones(3), [], [], exchange)
    assert not path.all_to_all(ones(1, 4), ones(1, 4), [], [], exchange)
    assert not path.all_to_all(ones(2), ones(4), [], [], exchange)
    group = dist.group.WORLD
    with dist._coalescing_manager(group, torch.device("cpu")):
        group.broadcast([ones(1)], sync_options(BroadcastOptions))
        assert group._usable_fast_path() is None
    assert group._usable_fast_path() is path
    tensor = ones(2)
    dist.all_reduce(tensor)
    same(tensor, torch.full((2,), 2.0))
