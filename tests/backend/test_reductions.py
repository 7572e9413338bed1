"""Reductions: every operation on every supported type, with equal bits on all ranks."""

import datetime

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend.oracle import COMPLEX, FLOATS, REDUCING, contribution, reduced, same

ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")


def allowed(op: str, dtype: torch.dtype) -> bool:
    if op in BITWISE:
        return not dtype.is_floating_point and not dtype.is_complex
    if op in ("MIN", "MAX"):
        return not dtype.is_complex
    if op == "AVG":
        return dtype != torch.bool
    return True


CASES = [(op, dtype) for op in (*ARITHMETIC, "AVG", *BITWISE) for dtype in REDUCING if allowed(op, dtype)]


def equal(got: torch.Tensor, wanted: torch.Tensor, op: str) -> None:
    """Compares exactly, except for the rounding of averages."""
    if op == "AVG":
        torch.testing.assert_close(got, wanted)
    else:
        same(got, wanted)


def options(cls_name: str, op: str, **fields):
    made = getattr(torch._C._distributed_c10d, cls_name)()
    made.reduceOp = getattr(dist.ReduceOp, op)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@on_ranks(1, 2, 3)
def test_all_reduce_reduces_every_type_by_every_operation():
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, dtype in CASES:
        tensor = contribution(rank, 13, dtype)
        # torch's function converts complex numbers to pairs; the group's method receives them unchanged.
        dist.group.WORLD.allreduce([tensor], options("AllreduceOptions", op)).wait()
        equal(tensor, reduced([contribution(r, 13, dtype) for r in range(size)], op), op)


@on_ranks(2, 3)
def test_reduce_returns_the_result_of_all_reduce_at_the_root():
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, dtype in CASES:
        for root in range(size):
            tensor = contribution(rank, 5, dtype)
            dist.group.WORLD.reduce([tensor], options("ReduceOptions", op, rootRank=root)).wait()
            if rank == root:
                equal(tensor, reduced([contribution(r, 5, dtype) for r in range(size)], op), op)
            else:
                same(tensor, contribution(rank, 5, dtype))


@on_ranks(1, 2, 3)
def test_reduce_scatter_gives_each_rank_its_block():
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, dtype in CASES:
        inputs = [contribution(rank, 4, dtype, salt=r) for r in range(size)]
        wanted = reduced([contribution(r, 4, dtype, salt=rank) for r in range(size)], op)
        output = torch.empty(4, dtype=dtype)
        dist.group.WORLD._reduce_scatter_base(output, torch.cat(inputs), options("ReduceScatterOptions", op)).wait()
        equal(output, wanted, op)
        output = torch.empty(4, dtype=dtype)
        dist.group.WORLD.reduce_scatter([output], [inputs], options("ReduceScatterOptions", op)).wait()
        equal(output, wanted, op)


@on_ranks(2, 3)
def test_reduce_scatter_takes_blocks_of_different_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(5 * rank)
    dist.reduce_scatter(output, [contribution(rank, 5 * r, torch.float32, salt=r) for r in range(size)])
    same(output, sum(contribution(r, 5 * rank, torch.float32, salt=rank) for r in range(size)))


@on_ranks(2)
def test_large_and_empty_reductions():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in (0, 1, 300_000):
        for async_op in (False, True):
            tensor = contribution(rank, count, torch.float32)
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
            same(tensor, sum(contribution(r, count, torch.float32) for r in range(size)))
            output = torch.empty(count)
            dist.reduce_scatter_tensor(output, contribution(rank, count * size, torch.float32))
            whole = sum(contribution(r, count * size, torch.float32) for r in range(size))
            same(output, whole[rank * count : (rank + 1) * count])


@on_ranks(2, 3)
def test_inexact_sums_have_equal_bits_on_all_ranks():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        generator = torch.Generator().manual_seed(rank)
        tensor = torch.randn(10_007, generator=generator).to(dtype)
        dist.all_reduce(tensor)
        everyone = torch.empty(size * 10_007, dtype=dtype)
        dist.all_gather_into_tensor(everyone, tensor)
        for part in everyone.chunk(size):
            same(part, tensor)


@on_ranks(3)
def test_half_precision_sums_round_once():
    """256 + 1 + 1 is 258 in bfloat16, but 256 when rounded after each addition."""
    value = 256.0 if dist.get_rank() == 0 else 1.0
    tensor = torch.full((9,), value, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    same(tensor, torch.full((9,), 258.0, dtype=torch.bfloat16))


@on_ranks(2)
def test_premul_sum_uses_the_factor_of_the_operation():
    rank, size = dist.get_rank(), dist.get_world_size()
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        tensor = contribution(rank, 6, torch.float32)
        dist.all_reduce(tensor, op)
        same(tensor, sum(contribution(r, 6, torch.float32) * 0.5 for r in range(size)))
        output = torch.empty(3)
        dist.reduce_scatter_tensor(output, contribution(rank, 6, torch.float32), op)
        same(output, tensor[rank * 3 : rank * 3 + 3])


@on_ranks(2)
def test_unsupported_reductions_are_refused_before_any_transfer():
    rank = dist.get_rank()
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=r"ReduceOp\.BAND with non-integral dtype"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    for dtype in COMPLEX:
        with pytest.raises(ValueError, match="complex"):
            group.allreduce([torch.ones(2, dtype=dtype)], options("AllreduceOptions", "MAX"))
    with pytest.raises(ValueError, match="bool"):
        dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(TypeError, match=r"float8_e4m3fn.*does not reduce"):
        dist.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))
    # Newer torch refuses PREMUL_SUM without a factor itself.
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.PREMUL_SUM)
    tensor = torch.full((2,), float(rank))
    dist.all_reduce(tensor)
    same(tensor, torch.ones(2))


@on_ranks(2, 3)
def test_sparse_tensors_are_summed():
    rank, size = dist.get_rank(), dist.get_world_size()

    def sparse(r: int) -> torch.Tensor:
        # Rank r has r + 1 entries of a hybrid tensor, some at the indices of other ranks' entries.
        indices = torch.tensor([[i % 3 for i in range(r + 1)], [i % 2 for i in range(r + 1)]])
        return torch.sparse_coo_tensor(indices, torch.full((r + 1, 2), float(r + 1)), (3, 2, 2))

    tensor = sparse(rank)
    dist.all_reduce(tensor)
    same(tensor.to_dense(), sum(sparse(r).to_dense() for r in range(size)))
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,))
    if rank == 0:
        empty = torch.sparse_coo_tensor(torch.tensor([[2]]), torch.tensor([5.0]), (4,))
    dist.all_reduce(empty, async_op=True).wait()
    same(empty.to_dense(), torch.tensor([0.0, 0.0, 5.0, 0.0]))
    with pytest.raises(ValueError, match="differ"):
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4 + rank,)))


@on_ranks(2)
def test_sparse_tensors_without_sparse_dimensions_or_elements_are_summed():
    shapes = [((0, 2), (2,), ()), ((0, 1), (1, 3), (3,)), ((1, 2), (2, 0), (4, 0)), ((2, 0), (0, 0), (3, 2, 0))]
    for indices, values, shape in shapes:
        tensor = torch.sparse_coo_tensor(torch.zeros(indices, dtype=torch.int64), torch.ones(values), shape)
        expected = tensor.to_dense() * 2
        dist.all_reduce(tensor)
        same(tensor.to_dense(), expected)


@on_ranks(2)
def test_sparse_all_reduce_uses_the_timeout_of_its_options():
    group = dist.new_group()
    if dist.get_rank() == 0:
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=0.2)
        with pytest.raises(smddp.CollectiveTimeoutError):
            group.allreduce([torch.eye(2).to_sparse()], options)
    dist.barrier()


@on_ranks(2)
def test_sparse_all_reduce_is_not_an_all_gather():
    group = dist.new_group()
    with pytest.raises(smddp.MismatchError, match="of a sparse all_reduce"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.eye(2).to_sparse(), group=group)
        else:
            dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([5]), group=group)
    dist.barrier()


@on_ranks(2)
def test_sparse_tensors_are_summed_with_any_default_device():
    tensor = torch.eye(2).to_sparse()
    # On the group: torch's front end ignores the default device, but some of torch's callers do not.
    with torch.device("meta"):
        dist.group.WORLD.allreduce([tensor]).wait()
    same(tensor.to_dense(), torch.eye(2) * 2)


@on_ranks(2)
def test_denormals_are_kept_where_torch_flushes_them():
    """torch's kernels flush them on this thread; sums must be equal on all ranks."""
    tiny = torch.finfo(torch.float32).tiny
    source = torch.full((1000,), tiny / 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        for async_op in (False, True):
            tensor = source.view(torch.int32).clone().view(torch.float32)
            work = dist.all_reduce(tensor, async_op=async_op)
            if async_op:
                work.wait()
            # Compared as bits: torch treats denormals as zeros.
            assert tensor.view(torch.int32).unique().tolist() == [1 << 22]
            assert (torch.ones(1) * tiny / 2).item() == 0, "the caller's mode"
    finally:
        torch.set_flush_denormal(False)


@on_ranks(2)
def test_integer_averages_divide_the_wrapped_sum():
    """Partial sums are sent in the tensor's type, as in NCCL."""
    tensor = torch.tensor([60_000, 3], dtype=torch.uint16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [(120_000 - 65_536) // 2, 3]
    tensor = torch.tensor([100, -3], dtype=torch.int8)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [-28, -3]
