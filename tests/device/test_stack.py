"""CUDA tensors through the whole stack in rank processes: smddp's Python, its core, and a fake driver."""

import datetime
import os
import signal
import threading
import time
from unittest import mock

import pytest
import smddp
import torch
import torch.distributed as dist
from backend.oracle import contribution, reduced, same
from ranks.cases import keeps_group
from ranks.group import again
from torch.distributed.device_mesh import init_device_mesh

from device import simulated as gpu
from device.machines import MACHINES, on_machines

ALL = tuple(MACHINES)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
COUNTS = (1, 1000, 70_001)


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def mine(count: int, dtype: torch.dtype = torch.float32, salt: int = 0, index: int = 0) -> torch.Tensor:
    return gpu.to(contribution(dist.get_rank(), count, dtype, salt), index)


def everyones(count: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> list[torch.Tensor]:
    return [contribution(rank, count, dtype, salt) for rank in range(dist.get_world_size())]


def holds(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    same(gpu.host(tensor), wanted)


def sync_and_async(check) -> None:
    """Runs the check with synchronous calls, then with handles."""
    check(lambda function, *args, **kwargs: function(*args, **kwargs))

    def waited(function, *args, **kwargs):
        work = function(*args, async_op=True, **kwargs)
        assert work.wait()
        assert work.exception() is None

    check(waited)


def sizes():
    for dtype in DTYPES:
        for count in COUNTS if dtype == torch.float32 else COUNTS[1:2]:
            yield dtype, count


def cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(dist.get_world_size()))


@on_machines(*ALL)
def test_collectives_without_arithmetic_deliver_the_data():
    rank, size = world()
    root = size - 1

    def check(run):
        for dtype, count in sizes():
            all_of_them = everyones(count, dtype)
            output = gpu.empty(size * count, dtype=dtype)
            run(dist.all_gather_into_tensor, output, mine(count, dtype))
            holds(output, torch.cat(all_of_them))
            outputs = [gpu.empty(count, dtype=dtype) for _ in range(size)]
            run(dist.all_gather, outputs, mine(count, dtype))
            for got, wanted in zip(outputs, all_of_them, strict=True):
                holds(got, wanted)
            tensor = mine(count, dtype)
            run(dist.broadcast, tensor, src=root)
            holds(tensor, all_of_them[root])
            outputs = [gpu.empty(count, dtype=dtype) for _ in range(size)] if rank == root else None
            run(dist.gather, mine(count, dtype), outputs, dst=root)
            for got, wanted in zip(outputs or (), all_of_them):
                holds(got, wanted)
            inputs = [gpu.to(contribution(r, count, dtype, 5)) for r in range(size)] if rank == root else None
            output = gpu.empty(count, dtype=dtype)
            run(dist.scatter, output, inputs, src=root)
            holds(output, contribution(rank, count, dtype, 5))
            output = gpu.empty(size * count, dtype=dtype)
            run(dist.all_to_all_single, output, mine(size * count, dtype))
            holds(output, torch.cat([cut(whole)[rank] for whole in everyones(size * count, dtype)]))

    sync_and_async(check)


@on_machines(*ALL)
def test_reductions_combine_all_ranks():
    rank, size = world()
    root = size - 1

    def ops(dtype):
        if dtype == torch.bool:
            return "SUM", "MAX", "BAND"
        return ("SUM", "AVG", "MIN", "PRODUCT") if dtype.is_floating_point else ("SUM", "AVG", "MAX", "BXOR")

    def check(run):
        for dtype, count in sizes():
            for name in ops(dtype) if count == COUNTS[1] else ("SUM",):
                op = getattr(dist.ReduceOp, name)
                tensor = mine(count, dtype)
                run(dist.all_reduce, tensor, op=op)
                holds(tensor, reduced(everyones(count, dtype), name))
                tensor = mine(count, dtype)
                run(dist.reduce, tensor, dst=root, op=op)
                if rank == root:
                    holds(tensor, reduced(everyones(count, dtype), name))
                wanted = reduced([cut(whole)[rank] for whole in everyones(size * count, dtype)], name)
                output = gpu.empty(count, dtype=dtype)
                run(dist.reduce_scatter_tensor, output, mine(size * count, dtype), op=op)
                holds(output, wanted)
                output = gpu.empty(count, dtype=dtype)
                inputs = [gpu.to(part) for part in cut(contribution(rank, size * count, dtype))]
                run(dist.reduce_scatter, output, inputs, op=op)
                holds(output, wanted)

    sync_and_async(check)


@on_machines(*ALL)
def test_premul_sum_multiplies_before_it_adds_and_keeps_the_input():
    rank, size = world()
    op = dist._make_nccl_premul_sum(0.5)
    tensor = mine(1000)
    dist.all_reduce(tensor, op=op)
    holds(tensor, sum(whole * 0.5 for whole in everyones(1000)))
    output, source = gpu.empty(1000), mine(size * 1000)
    dist.reduce_scatter_tensor(output, source, op=op)
    holds(output, sum(cut(whole)[rank] * 0.5 for whole in everyones(size * 1000)))
    holds(source, contribution(rank, size * 1000, torch.float32))


@on_machines(*ALL)
def test_all_to_all_accepts_blocks_of_any_size():
    rank, size = world()
    send = [(rank + r) % 3 * 500 for r in range(size)]
    get = [(r + rank) % 3 * 500 for r in range(size)]
    wanted = [contribution(r, get[r], torch.float32, rank) for r in range(size)]
    blocks = [contribution(rank, send[r], torch.float32, r) for r in range(size)]
    output = gpu.empty(sum(get))
    dist.all_to_all_single(output, gpu.to(torch.cat(blocks)), get, send)
    holds(output, torch.cat(wanted))
    outputs = [gpu.empty(count) for count in get]
    dist.all_to_all(outputs, [gpu.to(each) for each in blocks])
    for got, want in zip(outputs, wanted, strict=True):
        holds(got, want)


@on_machines("reference", "host")
def test_empty_tensors_are_accepted():
    _, size = world()
    output = gpu.empty(0)
    dist.all_gather_into_tensor(output, gpu.empty(0))
    dist.all_reduce(output)
    dist.all_to_all_single(output, gpu.empty(0))
    outputs = [gpu.empty(4 * r) for r in range(size)]
    dist.all_gather(outputs, mine(4 * dist.get_rank()))
    for r, got in enumerate(outputs):
        holds(got, contribution(r, 4 * r, torch.float32))


@on_machines(*ALL)
def test_outputs_may_be_parts_of_the_inputs_memory():
    rank, size = world()
    for count in (1000, 70_001):
        whole = gpu.empty(size * count)
        own = whole[rank * count : (rank + 1) * count]
        own.copy_(mine(count))
        dist.all_gather_into_tensor(whole, own)
        holds(whole, torch.cat(everyones(count)))
        whole = mine(size * count)
        own = whole[rank * count : (rank + 1) * count]
        dist.reduce_scatter_tensor(own, whole)
        holds(own, reduced([cut(each)[rank] for each in everyones(size * count)], "SUM"))
        whole = mine(size * count)
        dist.all_to_all_single(whole, whole)
        holds(whole, torch.cat([cut(each)[rank] for each in everyones(size * count)]))


@on_machines(*ALL)
def test_strided_outputs_are_copied_before_later_work():
    rank, size = world()

    def check(run):
        # A column of a table, then a transposed tensor.
        table = gpu.to(contribution(rank, 2000, torch.float32).view(1000, 2))
        run(dist.all_reduce, table[:, 1])
        wanted = contribution(rank, 2000, torch.float32).view(1000, 2)
        wanted[:, 1] = sum(each.view(1000, 2)[:, 1] for each in everyones(2000))
        holds(table, wanted)
        outputs = [gpu.empty(30, 40).t() for _ in range(size)]
        run(dist.all_gather, outputs, gpu.to(contribution(rank, 1200, torch.float32).view(30, 40)).t())
        for got, each in zip(outputs, everyones(1200), strict=True):
            assert not got.is_contiguous()
            holds(got, each.view(30, 40).t())
        output = gpu.empty(20, size).t()
        run(dist.all_to_all_single, output, gpu.to(contribution(rank, 20 * size, torch.float32).view(20, size)).t())
        holds(output, torch.stack([each.view(20, size).t()[rank] for each in everyones(20 * size)]))

    sync_and_async(check)


@on_machines("reference", "host")
def test_strided_outputs_are_copied_without_a_wait():
    table = gpu.to(torch.zeros(500, 2))
    table[:, 0].copy_(mine(500))
    gpu.finish(0)
    work = dist.all_reduce(table[:, 0], async_op=True)
    until(work.is_completed)
    # No stream waits: the host found the call complete.
    with gpu.stream(gpu.Stream(0)):
        holds(table[:, 0].contiguous(), reduced(everyones(500), "SUM"))


def until(ready, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"not reached within {seconds} s"
        time.sleep(0.002)
        # The core releases tensors in the next call from Python.
        dist.group.WORLD.communicator.sequence()


@on_machines(*ALL)
def test_one_wait_completes_coalesced_calls_and_blocks():
    rank, size = world()
    device = torch.device("cuda", 0)
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        several = [mine(count) for count in (10, 5000)]
        for tensor in several:
            dist.all_reduce(tensor)
    block.wait()
    for tensor in several:
        holds(tensor, reduced(everyones(tensor.numel()), "SUM"))
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        outputs = [gpu.empty(size * count) for count in (10, 5000)]
        for output in outputs:
            dist.all_gather_into_tensor(output, mine(output.numel() // size))
    block.wait()
    for output in outputs:
        holds(output, torch.cat(everyones(output.numel() // size)))
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        outputs = [gpu.empty(count) for count in (10, 5000)]
        for output in outputs:
            dist.reduce_scatter_tensor(output, mine(output.numel() * size))
    block.wait()
    for output in outputs:
        holds(output, reduced([cut(each)[rank] for each in everyones(output.numel() * size)], "SUM"))
    several = [mine(10), mine(5000)]
    dist.all_reduce_coalesced(several)
    for tensor in several:
        holds(tensor, reduced(everyones(tensor.numel()), "SUM"))


@on_machines(*ALL)
def test_many_pending_calls_are_waited_for_in_any_order():
    tensors = [mine(3000, salt=step) for step in range(24)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for step in (*range(23, -1, -2), *range(0, 24, 2)):
        works[step].wait()
        holds(tensors[step], reduced(everyones(3000, salt=step), "SUM"))
    for work in works:
        until(work.is_completed)
        assert work.is_success()


@on_machines("reference")
def test_futures_run_ahead_of_the_device_and_their_callbacks_after_the_call():
    tensor = mine(3000)
    with gpu.stream(gpu.Stream(0)) as caller:
        dist.all_reduce(gpu.empty(1))
        gpu.finish(0)
        with gpu.Held(caller):
            future = dist.all_reduce(tensor, async_op=True).get_future()
            # Complete when all ranks have made the call; the device has not started.
            until(future.done)
            twice = gpu.empty(3000)
            chained = future.then(lambda f: twice.copy_(f.wait()[0]))
            copied = gpu.empty(3000)
            copied.copy_(chained.wait())
        holds(copied, reduced(everyones(3000), "SUM"))
        holds(twice, reduced(everyones(3000), "SUM"))


@on_machines("reference")
def test_calls_and_waits_never_block_the_host_and_data_is_ordered_by_streams():
    """The callers' streams are blocked, so a wait for them on the host would block too."""
    _, size = world()
    dist.all_reduce(gpu.empty(1))
    values = mine(5000)
    gpu.finish(0)
    source, copied = gpu.empty(5000), gpu.empty(5000)
    with gpu.stream(gpu.Stream(0)) as caller, gpu.Held(caller) as held:
        source.copy_(values)
        work = dist.all_reduce(source, async_op=True)
        work.wait()
        copied.copy_(source)
        gathered = gpu.empty(size * 5000)
        dist.all_gather_into_tensor(gathered, values)
        other = gpu.Stream(0)
        with gpu.stream(other):
            work.wait()
            elsewhere = gpu.empty(5000)
            elsewhere.copy_(source)
        assert not work.is_completed()
        held.release()
        holds(copied, reduced(everyones(5000), "SUM"))
        holds(gathered, torch.cat(everyones(5000)))
        with gpu.stream(other):
            holds(elsewhere, reduced(everyones(5000), "SUM"))


@on_machines(*ALL)
def test_tensors_may_be_dropped_while_the_device_uses_them():
    _, size = world()
    dist.all_reduce(gpu.empty(1))
    gpu.finish(0)
    before = gpu.allocator(0).in_use
    with gpu.stream(gpu.Stream(0)) as caller:
        results = []
        with gpu.Held(caller):
            for step in range(8):
                output = gpu.empty(size * 2000)
                dist.all_gather_into_tensor(output, mine(2000, salt=step), async_op=True)
                results.append(output)
            # As many tensors of the same size as were dropped: none may reuse their memory yet.
            others = [gpu.to(torch.full((2000,), -1.0)) for _ in range(8)]
        dist.barrier()
        last = mine(1)
        dist.all_reduce(last)
        for step, output in enumerate(results):
            holds(output, torch.cat(everyones(2000, salt=step)))
        for other in others:
            holds(other, torch.full((2000,), -1.0))
    del results, others, output, other, last
    until(lambda: gpu.allocator(0).in_use <= before)


@on_machines("reference", "nodes")
def test_groups_and_streams_side_by_side():
    rank, size = world()
    groups = [dist.new_group([0, 1]), dist.new_group([0, size - 1])]
    members = [[0, 1], [0, size - 1]]
    streams = [gpu.Stream(0) for _ in groups]
    for step in range(4):
        works = []
        for group, ranks, used in zip(groups, members, streams, strict=True):
            if rank in ranks:
                with gpu.stream(used):
                    tensor = mine(4000, salt=step)
                    works.append((tensor, ranks, used, dist.all_reduce(tensor, group=group, async_op=True)))
        tensor = mine(4000, salt=step)
        dist.all_reduce(tensor)
        holds(tensor, reduced(everyones(4000, salt=step), "SUM"))
        for tensor, ranks, used, work in works:
            with gpu.stream(used):
                work.wait()
                holds(tensor, reduced([contribution(r, 4000, torch.float32, step) for r in ranks], "SUM"))
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)


@on_machines(*ALL)
def test_messages_between_two_ranks_are_staged_in_host_memory():
    rank, size = world()
    to, source = (rank + 1) % size, (rank - 1) % size
    tensor, got = mine(5000), gpu.empty(5000)
    work = dist.isend(tensor, to)
    dist.recv(got, source)
    work.wait()
    holds(got, contribution(source, 5000, torch.float32))
    column = gpu.to(torch.zeros(500, 2))
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine(500), to), dist.P2POp(dist.irecv, column[:, 1], source)]
    )
    for request in requests:
        request.wait()
    holds(column[:, 1].contiguous(), contribution(source, 500, torch.float32))
    holds(column[:, 0].contiguous(), torch.zeros(500))


@on_machines("reference", "host")
def test_cpu_tensors_and_barriers_in_the_same_group():
    for step in range(3):
        on_device, on_host = mine(100, salt=step), contribution(dist.get_rank(), 100, torch.float32, step + 1)
        work = dist.all_reduce(on_device, async_op=True)
        dist.all_reduce(on_host)
        same(on_host, reduced(everyones(100, salt=step + 1), "SUM"))
        dist.barrier()
        work.wait()
        holds(on_device, reduced(everyones(100, salt=step), "SUM"))
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, dist.get_rank())
    assert answers == list(range(dist.get_world_size()))


@on_machines("reference", "host")
def test_a_barrier_completes_after_the_streams_of_all_ranks():
    dist.all_reduce(gpu.empty(1))
    with gpu.stream(gpu.Stream(0)):
        values, source = mine(100_000), gpu.empty(100_000)
        source.copy_(values)
        dist.all_reduce(source)
        dist.barrier()
        # The host may read: the barrier has waited for the stream.
        with torch._C.DisableTorchFunctionSubclass():
            same(source.as_subclass(torch.Tensor), reduced(everyones(100_000), "SUM"))


@on_machines(*ALL)
def test_one_group_uses_several_devices():
    for step in range(3):
        for index in (0, 1):
            tensor = mine(3000, salt=step, index=index)
            assert tensor.device == torch.device("cuda", index)
            dist.all_reduce(tensor)
            holds(tensor, reduced(everyones(3000, salt=step), "SUM"))


@on_machines("reference")
def test_ranks_may_use_different_devices():
    rank, size = world()
    group = dist.new_group()
    index = rank % 2
    output = gpu.empty(size * 3000, index=index)
    dist.all_gather_into_tensor(output, mine(3000, index=index), group=group)
    holds(output, torch.cat(everyones(3000)))
    tensor = mine(3000, index=index)
    dist.all_reduce(tensor, group=group)
    holds(tensor, reduced(everyones(3000), "SUM"))
    dist.destroy_process_group(group)


@on_machines("reference", "host")
def test_a_refused_call_leaves_the_group_usable():
    tensor = mine(10)
    dist.all_reduce(tensor)
    with gpu.stream(gpu.Stream(0)) as caller:
        with gpu.capture(caller), pytest.raises(RuntimeError, match="captured"):
            dist.all_reduce(tensor)
        with pytest.raises(ValueError, match="one device"):
            dist.all_gather([mine(10, index=1) for _ in range(dist.get_world_size())], mine(10))
        tensor = mine(10)
        dist.all_reduce(tensor)
        holds(tensor, reduced(everyones(10), "SUM"))


def in_use() -> dist.ProcessGroup:
    """Returns a group whose first call is complete on all ranks; a pending one would receive a later failure."""
    group = dist.new_group()
    dist.all_reduce(mine(10), group=group)
    gpu.finish(0)
    dist.barrier()
    return group


@on_machines("reference", "host")
def test_memory_that_is_not_on_a_device_is_refused_before_it_is_enqueued():
    group = in_use()
    foreign = torch.ones(10).as_subclass(gpu.OnDevice)
    with pytest.raises(smddp.Error, match="not CUDA memory"):
        dist.all_reduce(foreign, group=group, async_op=True).wait(datetime.timedelta(seconds=20))
    gpu.finish(0)
    dist.destroy_process_group(group)


@on_machines(*ALL)
def test_mismatched_calls_raise_on_every_rank_and_no_stream_is_stuck():
    rank, _ = world()
    group = in_use()
    with gpu.stream(gpu.Stream(0)):
        # The last rank receives the mismatch from the others during its call.
        with pytest.raises(smddp.MismatchError):
            dist.all_reduce(mine(10 + (rank == 0)), group=group, async_op=True).wait(datetime.timedelta(seconds=20))
        with pytest.raises(smddp.Error):
            dist.all_reduce(mine(10), group=group)
        gpu.finish(0)
    dist.destroy_process_group(group)
    tensor = mine(10)
    dist.all_reduce(tensor)
    holds(tensor, reduced(everyones(10), "SUM"))


@on_machines("reference")
def test_futures_complete_when_all_ranks_have_made_the_call():
    rank, size = world()
    dist.all_reduce(gpu.empty(1))
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    tensor = mine(3000)
    if rank == size - 1:
        store.get("a future that is not complete")
    with gpu.stream(gpu.Stream(0)) as caller:
        gpu.finish(0)
        with gpu.Held(caller):
            future = dist.all_reduce(tensor, async_op=True).get_future()
            if rank == 0:
                assert not future.done()
                store.set("a future that is not complete", "seen")
            # No device has sent data yet.
            until(future.done)
            chained = future.then(lambda f: f.wait()[0])
        holds(chained.wait(), reduced(everyones(3000), "SUM"))


@on_machines("reference")
def test_a_wait_blocks_the_host_until_all_ranks_have_made_the_call_or_raises():
    rank, size = world()
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(mine(10), group=group)
    dist.barrier()
    group.set_timeout(datetime.timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    if rank != size - 1:
        with pytest.raises(smddp.CollectiveTimeoutError, match=rf"missing: .*rank {size - 1}"):
            dist.all_reduce(mine(10), group=group, async_op=True).wait()
        gpu.finish(0)
        store.set(f"raised {rank}", "yes")
    for other in range(size - 1):
        store.get(f"raised {other}")
    dist.destroy_process_group(group)
    dist.all_reduce(mine(10))


@on_machines("reference", "host")
def test_streams_continue_after_an_expired_deadline():
    rank, _ = world()
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(mine(10), group=group)
    gpu.finish(0)
    dist.barrier()
    group.set_timeout(datetime.timedelta(seconds=1))
    if rank != 0:
        with pytest.raises(smddp.Error):
            dist.all_reduce(mine(10), group=group)
        # No stream is blocked.
        gpu.finish(0)
    dist.barrier()
    dist.destroy_process_group(group)


@on_machines(*ALL)
def test_each_machine_uses_its_path():
    """The other cases rely on the path of their machine."""
    dist.all_reduce(mine(10))
    comm = dist.group.WORLD.communicator
    assert os.environ["SMDDP_TEST_PATH"] in comm.device_path(0)
    assert len(set(comm.nodes())) == int(os.environ["SMDDP_TEST_NODES"])


@on_machines("reference", "nodes")
def test_a_group_bound_to_a_device_accepts_only_that_device():
    again(device_id=torch.device("cuda", 1))
    try:
        dist.barrier()
        tensor = mine(100, index=1)
        dist.all_reduce(tensor)
        holds(tensor, reduced(everyones(100), "SUM"))
        with pytest.raises(ValueError, match="bound to cuda:1"):
            dist.all_reduce(mine(100))
    finally:
        again()


@on_machines("nodes")
def test_the_groups_of_a_mesh_over_a_bound_group_are_bound():
    rank, _ = world()
    again(device_id=torch.device("cuda", 1))
    try:
        # With a splittable backend torch splits the group.
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "is_initialized", lambda: True),
            mock.patch.object(torch.cuda, "current_device", lambda: 1),
            mock.patch.object(torch.cuda, "device_count", lambda: 2),
        ):
            mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
        for name, ranks in (("a", [rank % 2, rank % 2 + 2]), ("b", [rank // 2 * 2, rank // 2 * 2 + 1])):
            group = mesh.get_group(name)
            assert dist.get_process_group_ranks(group) == ranks
            tensor = mine(100, index=1)
            dist.all_reduce(tensor, group=group)
            holds(tensor, reduced([contribution(r, 100, torch.float32) for r in ranks], "SUM"))
            with pytest.raises(ValueError, match="bound to cuda:1"):
                dist.all_reduce(mine(100), group=group)
    finally:
        again()


@on_machines("reference")
def test_destroyed_groups_free_their_device_objects():
    dist.all_reduce(mine(10))
    gpu.finish(0)
    blocks = gpu.allocator(0).in_use

    def one_group() -> None:
        group = dist.new_group()
        for count in (10, 100_000):
            dist.all_reduce(mine(count), group=group)
            dist.all_gather_into_tensor(gpu.empty(count * dist.get_world_size()), mine(count), group=group)
        gpu.finish(0)
        dist.destroy_process_group(group)
        until(lambda: gpu.allocator(0).in_use <= blocks)

    one_group()
    opened = gpu.driver.open()
    for _ in range(4):
        one_group()
    # The allocator creates and frees events; a leak of one object per group exceeds the limit.
    until(lambda: gpu.allocator(0).in_use <= blocks and gpu.driver.open() < opened + 4)


@on_machines("reference", "host")
def test_tensors_may_outlive_their_group():
    """torch's allocator uses the streams of a destroyed group when it frees tensors."""
    group = dist.new_group()
    tensor = mine(1000)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    holds(tensor, reduced(everyones(1000), "SUM"))
    del tensor
    dist.all_reduce(mine(1000))


@keeps_group
def one_rank_dies() -> None:
    rank, _ = world()
    dist.all_reduce(mine(10))
    gpu.finish(0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with gpu.stream(gpu.Stream(0)):
        with pytest.raises(smddp.PeerLostError) as caught:
            work = dist.all_reduce(mine(100_000), async_op=True)
            work.wait()
            gpu.finish(0)
            work.wait(datetime.timedelta(seconds=20))
        assert caught.value.ranks == [1]
        with pytest.raises(smddp.PeerLostError):
            dist.all_reduce(mine(10))
        gpu.finish(0)
    dist.destroy_process_group()


@pytest.mark.parametrize("machine", ALL)
def test_the_death_of_a_rank_is_reported_to_the_others_and_no_stream_is_stuck(machine, machines):
    """Runs last, because it ends the ranks."""
    pool = machines(machine)
    answers = pool.ask(__name__, "one_rank_dies", 60)
    pool.close()
    assert list(answers) == [1], answers
    assert "status -9" in answers[1]


@on_machines("reference")
def test_python_continues_while_another_thread_prepares_a_device():
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    group = dist.new_group(list(range(dist.get_world_size())))
    if rank == 0:
        preparing = threading.Thread(target=lambda: dist.all_reduce(mine(3), group=group))
        preparing.start()
        began = time.monotonic()
        # The thread waits for the other ranks.
        while time.monotonic() - began < 0.5:
            assert group.communicator.device_path(0) is None
            time.sleep(0.01)
        store.set("looked", "yes")
        preparing.join()
        # Queries returned immediately, in half a second instead of the deadline.
        assert time.monotonic() - began < 20
    else:
        store.wait(["looked"])
        dist.all_reduce(mine(3), group=group)
    assert group.communicator.device_path(0) is not None
