"""Every collective in all forms of torch, compared with the expected result."""

import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend.oracle import MOVING, contribution, same

COUNTS = (0, 1, 5, 1000, 70_001)


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def both_ways(call) -> None:
    """Runs a call synchronously, then with a handle."""
    call(lambda function, *args, **kwargs: function(*args, **kwargs))

    def waited(function, *args, **kwargs):
        work = function(*args, async_op=True, **kwargs)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None

    call(waited)


@on_ranks(1, 2, 3)
def test_all_gather_into_tensor_puts_each_block_in_its_place():
    rank, size = world()

    def check(run):
        for dtype in MOVING:
            for count in COUNTS if dtype == torch.float32 else (5,):
                output = torch.empty(size * count, dtype=dtype)
                run(dist.all_gather_into_tensor, output, contribution(rank, count, dtype))
                same(output, torch.cat([contribution(r, count, dtype) for r in range(size)]))

    both_ways(check)


@on_ranks(2, 3)
def test_all_gather_takes_a_flat_output_for_a_shaped_input():
    rank, size = world()
    output = torch.empty(size * 4)
    dist.all_gather_into_tensor(output, contribution(rank, 4, torch.float32).view(1, 4))
    same(output, torch.cat([contribution(r, 4, torch.float32) for r in range(size)]))
    stacked = torch.empty(size, 2, 2)
    dist.all_gather_into_tensor(stacked, contribution(rank, 4, torch.float32).view(2, 2))
    same(stacked.flatten(), output)


@on_ranks(1, 2, 3)
def test_all_gather_fills_a_list():
    rank, size = world()

    def check(run):
        for dtype in MOVING:
            if dtype == torch.complex32:
                continue  # torch passes complex lists as real ones, which this type does not support
            outputs = [torch.empty(6, dtype=dtype).view(2, 3) for _ in range(size)]
            run(dist.all_gather, outputs, contribution(rank, 6, dtype).view(2, 3))
            for r, output in enumerate(outputs):
                same(output, contribution(r, 6, dtype).view(2, 3))

    both_ways(check)


@on_ranks(2, 3)
def test_all_gather_takes_blocks_of_different_sizes():
    rank, size = world()
    outputs = [torch.empty(3 * r) for r in range(size)]
    dist.all_gather(outputs, contribution(rank, 3 * rank, torch.float32))
    for r, output in enumerate(outputs):
        same(output, contribution(r, 3 * r, torch.float32))


@on_ranks(2)
def test_all_gather_of_a_slice_of_the_output_works_in_place():
    rank, size = world()
    output = torch.zeros(size * 1000)
    mine = output[rank * 1000 : (rank + 1) * 1000]
    mine.copy_(contribution(rank, 1000, torch.float32))
    dist.all_gather_into_tensor(output, mine)
    same(output, torch.cat([contribution(r, 1000, torch.float32) for r in range(size)]))


@on_ranks(1, 2, 3)
def test_broadcast_reaches_every_rank_from_every_root():
    rank, size = world()

    def check(run):
        for root in range(size):
            for dtype in MOVING:
                tensor = contribution(rank, 7, dtype)
                run(dist.broadcast, tensor, root)
                same(tensor, contribution(root, 7, dtype))
            for count in COUNTS:
                tensor = contribution(rank, count, torch.float32)
                run(dist.broadcast, tensor, root)
                same(tensor, contribution(root, count, torch.float32))

    both_ways(check)


@on_ranks(1, 2, 3)
def test_scatter_reverses_gather():
    rank, size = world()

    def check(run):
        for root in range(size):
            for count in COUNTS:
                mine = contribution(rank, count, torch.float32)
                blocks = [torch.empty(count) for _ in range(size)] if rank == root else None
                run(dist.gather, mine, blocks, root)
                if blocks is not None:
                    for r, block in enumerate(blocks):
                        same(block, contribution(r, count, torch.float32))
                back = torch.empty(count)
                run(dist.scatter, back, blocks, root)
                same(back, mine)

    both_ways(check)


@on_ranks(2)
def test_gather_single_stacks_the_blocks_at_the_root():
    rank, size = world()
    output = torch.empty(size * 3)
    options = torch._C._distributed_c10d.GatherOptions()
    options.rootRank = 1
    dist.group.WORLD.gather_single(output, contribution(rank, 3, torch.float32), options).wait()
    if rank == 1:
        same(output, torch.cat([contribution(r, 3, torch.float32) for r in range(size)]))


@on_ranks(1, 2, 3)
def test_all_to_all_single_transposes_even_blocks():
    rank, size = world()

    def check(run):
        for dtype in MOVING:
            if dtype == torch.complex32:
                continue
            source = torch.cat([contribution(rank, 4, dtype, salt=r) for r in range(size)])
            output = torch.empty_like(source)
            run(dist.all_to_all_single, output, source)
            same(output, torch.cat([contribution(r, 4, dtype, salt=rank) for r in range(size)]))

    both_ways(check)


@on_ranks(2, 3)
def test_all_to_all_single_takes_uneven_splits_and_shaped_rows():
    rank, size = world()

    def check(run):
        # Rank r sends r + d rows to rank d.
        sends = [rank + d for d in range(size)]
        receives = [r + rank for r in range(size)]
        source = torch.cat([contribution(rank, 2 * n, torch.int64, salt=d) for d, n in enumerate(sends)]).view(-1, 2)
        output = torch.empty(sum(receives), 2, dtype=torch.int64)
        run(dist.all_to_all_single, output, source, receives, sends)
        wanted = [contribution(r, 2 * n, torch.int64, salt=rank) for r, n in enumerate(receives)]
        same(output, torch.cat(wanted).view(-1, 2))

    both_ways(check)


@on_ranks(2, 3)
def test_all_to_all_of_lists_takes_any_sizes():
    rank, size = world()

    def check(run):
        inputs = [contribution(rank, 3 * (rank + d), torch.float32, salt=d) for d in range(size)]
        outputs = [torch.empty(3 * (r + rank)) for r in range(size)]
        run(dist.all_to_all, outputs, inputs)
        for r, output in enumerate(outputs):
            same(output, contribution(r, 3 * (r + rank), torch.float32, salt=rank))

    both_ways(check)


@on_ranks(2, 3)
def test_strided_tensors_are_read_and_written_as_their_elements():
    rank, size = world()

    def check(run):
        wide = contribution(rank, 24, torch.float32).view(4, 6)
        everyone = [contribution(r, 24, torch.float32).view(4, 6) for r in range(size)]
        # all_reduce in place, on columns of a wider tensor
        tensor = wide.clone()
        run(dist.all_reduce, tensor[:, ::2])
        same(tensor[:, ::2].contiguous(), sum(t[:, ::2] for t in everyone))
        same(tensor[:, 1::2].contiguous(), wide[:, 1::2].contiguous())
        # broadcast into and out of a transpose
        tensor = wide.clone()
        run(dist.broadcast, tensor.t(), 1)
        same(tensor, everyone[1])
        # all_gather from a transpose into transposes
        outputs = [torch.empty(6, 4).t() for _ in range(size)]
        run(dist.all_gather, outputs, wide.t().contiguous().t())
        for r, output in enumerate(outputs):
            same(output.contiguous(), everyone[r])
        flat = torch.empty(size * 12, 2)[:, 0]
        run(dist.all_gather_into_tensor, flat, wide[:, :3])
        same(flat.contiguous(), torch.cat([t[:, :3].flatten() for t in everyone]))
        # an expanded input
        output = torch.empty(size * 4)
        run(dist.all_gather_into_tensor, output, torch.tensor(float(rank)).expand(4))
        same(output, torch.arange(size).repeat_interleave(4).float())

    both_ways(check)


@on_ranks(2)
def test_lazily_conjugated_and_negated_tensors_are_resolved():
    rank, size = world()
    mine = contribution(rank, 4, torch.complex64).conj()
    outputs = [torch.empty(4, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([outputs], [mine]).wait()
    for r, output in enumerate(outputs):
        same(output, contribution(r, 4, torch.complex64).conj().resolve_conj())
    negative = contribution(rank, 4, torch.complex64).conj().imag
    assert negative.is_neg()
    gathered = torch.empty(size * 4)
    dist.all_gather_into_tensor(gathered, negative)
    same(gathered, torch.cat([contribution(r, 4, torch.complex64).conj().imag.resolve_neg() for r in range(size)]))


@on_ranks(2)
def test_strided_outputs_arrive_without_a_wait_on_their_own_handle():
    """The handle is dropped; a later collective of the group shows that the first is complete."""
    rank, size = world()
    tensor = torch.zeros(4, 2)
    work = dist.all_gather_into_tensor(tensor[:, 0][: 2 * size], torch.full((2,), float(rank + 1)), async_op=True)
    future = work.get_future()
    del work
    future.wait()
    same(tensor[:, 0][: 2 * size].contiguous(), torch.tensor([1.0, 1.0, 2.0, 2.0]))


@on_ranks(2)
def test_inference_tensors_and_tensors_with_grad_are_served():
    with torch.inference_mode():
        tensor = torch.ones(3, 2)[:, 0]
        dist.all_reduce(tensor)
        same(tensor.contiguous(), torch.full((3,), 2.0))
    leaf = torch.ones(4, requires_grad=True)
    output = torch.empty(8)
    dist.all_gather_into_tensor(output, leaf)
    same(output, torch.ones(8))
    with torch.no_grad():
        dist.all_reduce(leaf)
    same(leaf, torch.full((4,), 2.0))


@on_ranks(2, 3)
def test_objects_travel():
    rank, size = world()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    listed = [f"from {rank}", rank]
    dist.broadcast_object_list(listed, src=1)
    assert listed == ["from 1", 1]
    received = [None]
    dist.scatter_object_list(received, [f"to {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert received == [f"to {rank}"]
    collected = [None] * size if rank == 1 else None
    dist.gather_object(rank * 10, collected, dst=1)
    assert rank != 1 or collected == [r * 10 for r in range(size)]


@on_ranks(1, 2, 3)
def test_barrier_takes_device_ids_and_handles():
    dist.barrier()
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.barrier().wait()


@on_ranks(2)
def test_group_methods_take_fields_in_place_of_options():
    rank, size = world()
    group = dist.group.WORLD
    tensor = torch.full((2,), float(rank + 1))
    group.allreduce(tensor, dist.ReduceOp.MAX).wait()
    same(tensor, torch.full((2,), 2.0))
    group.allreduce([tensor]).wait()
    same(tensor, torch.full((2,), 4.0))
    tensor = torch.full((2,), float(rank))
    group.broadcast(tensor, 1).wait()
    same(tensor, torch.ones(2))
    group.reduce(tensor, 0, dist.ReduceOp.SUM).wait()
    outputs = [torch.empty(2) for _ in range(size)]
    group.allgather(outputs, torch.full((2,), float(rank))).wait()
    same(torch.stack(outputs)[:, 0], torch.arange(2.0))
    group.gather(outputs if rank == 1 else [], torch.ones(2), 1).wait()
    group.scatter(tensor, outputs if rank == 1 else [], 1).wait()
    same(tensor, torch.ones(2))
    group.reduce_scatter(tensor, [torch.ones(2), torch.ones(2)], dist.ReduceOp.SUM).wait()
    same(tensor, torch.full((2,), 2.0))
    group.alltoall(outputs, [torch.ones(2), torch.ones(2)]).wait()
    assert group.rank() == rank and group.size() == size and group.name() == "smddp"
