"""One handle for several calls."""

import threading
from collections.abc import Callable
from typing import Any

import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend.oracle import contribution, same


def everyone(count: int, salt: int = 0) -> list[torch.Tensor]:
    return [contribution(r, count, torch.float32, salt) for r in range(dist.get_world_size())]


@on_ranks(2, 3)
def test_coalesced_calls_process_all_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    tensors = [contribution(rank, n, torch.float32, salt=n) for n in (3, 0, 70)]
    world.allreduce_coalesced(tensors).wait()
    for n, tensor in zip((3, 0, 70), tensors, strict=True):
        same(tensor, sum(everyone(n, n)))
    outputs = [torch.empty(size * n) for n in (2, 5)]
    work = world.allgather_into_tensor_coalesced(outputs, [contribution(rank, n, torch.float32, n) for n in (2, 5)])
    assert work.wait()
    for n, output in zip((2, 5), outputs, strict=True):
        same(output, torch.cat(everyone(n, n)))
    outputs = [torch.empty(n) for n in (2, 5)]
    world.reduce_scatter_tensor_coalesced(
        outputs, [contribution(rank, size * n, torch.float32, n) for n in (2, 5)]
    ).wait()
    for n, output in zip((2, 5), outputs, strict=True):
        same(output, sum(everyone(size * n, n))[rank * n : rank * n + n])
    lists = [[torch.empty(n) for n in (2, 0, 5)] for _ in range(size)]
    world.allgather_coalesced(lists, [contribution(rank, n, torch.float32, n) for n in (2, 0, 5)]).wait()
    for r in range(size):
        for n, output in zip((2, 0, 5), lists[r], strict=True):
            same(output, contribution(r, n, torch.float32, n))


@on_ranks(2)
def test_torchs_coalescing_manager_takes_its_fast_path():
    rank = dist.get_rank()
    for async_ops in (False, True):
        tensors = [contribution(rank, n, torch.float32, n) for n in (3, 4)]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        for n, tensor in zip((3, 4), tensors, strict=True):
            same(tensor, sum(everyone(n, n)))


@on_ranks(2, 3)
def test_a_block_for_a_device_returns_one_handle():
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((4,), float(rank)) for _ in range(size)]
    with dist._coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=True) as manager:
        for root, tensor in enumerate(tensors):
            dist.broadcast(tensor, root, async_op=True)
    assert len(manager.works) == 1
    manager.wait()
    assert manager.works[0].is_completed()
    for root, tensor in enumerate(tensors):
        same(tensor, torch.full((4,), float(root)))


@on_ranks(2)
def test_an_empty_block_is_complete_immediately():
    with dist._coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=True) as manager:
        pass
    manager.wait()


@on_ranks(2)
def test_both_spellings_of_the_block_methods_exist():
    world = dist.group.WORLD
    for start, end in (("start_coalescing", "end_coalescing"), ("_start_coalescing", "_end_coalescing")):
        getattr(world, start)(torch.device("cpu"))
        tensor = torch.ones(2)
        world.allreduce([tensor])
        assert getattr(world, end)(torch.device("cpu")).wait()
        same(tensor, torch.full((2,), 2.0))


def elsewhere(what: Callable[[], object]) -> object:
    """Runs `what` on another thread. Returns its value, or its exception."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(what())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@on_ranks(1)
def test_blocks_and_estimates_belong_to_one_thread():
    """Two threads open, end and fail blocks and estimates concurrently."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    opened: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "block": (lambda: group._start_coalescing(cpu), lambda: group._end_coalescing(cpu).wait()),
        "estimate": (group._start_time_estimate, group._end_time_estimate),
    }

    def refused() -> None:
        group.all_gather_single(torch.empty(4), torch.ones(3))

    for name, (begin, end) in opened.items():
        begin()
        group.allreduce([torch.ones(2)])
        assert isinstance(elsewhere(refused), ValueError), name
        # The other thread has no open block and may open one.
        assert isinstance(elsewhere(end), RuntimeError), name
        for other in opened:
            failed = elsewhere(lambda other=other: [step() for step in opened[other]])
            assert not isinstance(failed, Exception), (name, other, failed)
        group.allreduce([torch.ones(2)])
        end()
    bound = elsewhere(lambda: smddp.bind(dist.all_reduce, torch.ones(2)))
    assert not isinstance(bound, Exception), bound
    group.allreduce([tensor := torch.full((2,), 5.0)]).wait()
    assert tensor.tolist() == [5.0, 5.0]


@on_ranks(2)
def test_messages_of_a_batch_with_an_invalid_part_do_not_start():
    """Sends and receives, to the peer and to the own rank, before and after the invalid part."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    batches = [
        [dist.P2POp(dist.irecv, torch.zeros(4), peer), dist.P2POp(dist.isend, bad, peer)]
        for bad in (freed, torch.eye(2).to_sparse())
    ] + [
        [dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.irecv, torch.zeros(1).expand(4), peer)],
        [dist.P2POp(dist.isend, torch.ones(4), rank), dist.P2POp(dist.irecv, freed, rank)],
        [dist.P2POp(dist.irecv, torch.zeros(4), rank), dist.P2POp(dist.isend, freed, rank)],
        [dist.P2POp(dist.isend, torch.ones(4), peer), dist.P2POp(dist.isend, torch.ones(4), peer, tag=-1)],
    ]
    for batch in batches:
        try:
            dist.batch_isend_irecv(batch)
            raise AssertionError("not refused")
        except ValueError:
            pass
    for other in (peer, rank):
        got = torch.zeros(4)
        sent = dist.isend(torch.full((4,), 7.0), other)
        dist.irecv(got, other).wait()
        sent.wait()
        assert got.tolist() == [7.0] * 4
    for batch in batches:
        for part in batch:
            assert part.op is not dist.irecv or part.tensor is freed or not part.tensor.any()


@on_ranks(2)
def test_parts_of_a_block_before_a_refused_part_run_and_the_group_stays_usable():
    """Rank 0 has a refused last part and makes the call again after the block; rank 1 has a valid one."""
    rank, peer, cpu = dist.get_rank(), 1 - dist.get_rank(), torch.device("cpu")
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    first, second = torch.full((4,), rank + 1.0), torch.full((4,), 10.0 * (rank + 1))
    sent, received = torch.full((3,), float(rank)), torch.full((3,), -1.0)
    group = dist.group.WORLD
    group._start_coalescing(cpu)
    group.allreduce([first])
    group.send([sent], peer, 0)
    group.recv([received], peer, 0)
    if rank == 0:
        try:
            group.allreduce([freed])
            raise AssertionError("not refused")
        except ValueError:
            group.allreduce([second]).wait()
    else:
        group.allreduce([second])
        group._end_coalescing(cpu).wait()
    dist.barrier()
    # The refusal ended the block of rank 0 without a handle. Collectives complete in order, messages need not.
    assert first.tolist() == [3.0] * 4 and second.tolist() == [30.0] * 4, (first, second)
    later = torch.full((2,), -1.0)
    dist.isend(torch.full((2,), 7.0), peer)
    dist.recv(later, peer)
    assert received.tolist() == [float(peer)] * 3 and later.tolist() == [7.0] * 2, (received, later)
