"""Groups: several at a time, overlapping, recreated, used from threads, inherited by forked children."""

import contextlib
import datetime
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import again

from backend.oracle import same


def ranks_sum(group=None) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


@on_ranks(3)
def test_overlapping_groups_work_side_by_side():
    rank = dist.get_rank()
    lists = [[0, 1], [1, 2], [2, 0], [0, 1, 2], [1]]
    groups = [dist.new_group(ranks) for ranks in lists]
    for _ in range(3):
        for ranks, group in zip(lists, groups, strict=True):
            if rank in ranks:
                assert ranks_sum(group) == sum(ranks)
    for ranks, group in zip(lists, groups, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    assert ranks_sum() == 3


@on_ranks(3)
def test_ranks_of_a_group_have_the_order_of_its_list():
    rank = dist.get_rank()
    group = dist.new_group([2, 0], use_local_synchronization=False)
    if rank in (0, 2):
        assert dist.get_group_rank(group, 2) == group.size() - 1  # torch sorts the list
        tensor = torch.full((2,), float(rank))
        dist.broadcast(tensor, src=2, group=group)
        same(tensor, torch.full((2,), 2.0))
    dist.barrier()


@on_ranks(3)
def test_split_group_makes_groups_in_the_order_given():
    rank = dist.get_rank()
    try:
        group = dist.split_group(split_ranks=[[2, 0]])
    except RuntimeError as error:
        pytest.skip(f"this torch splits only groups that are bound to a device: {error}")
    if rank == 1:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
    else:
        assert (group.rank(), group.size()) == ({2: 0, 0: 1}[rank], 2)
        assert ranks_sum(group) == 2
        gathered = [None, None]
        dist.all_gather_object(gathered, rank, group=group)
        assert gathered == [2, 0]
    dist.barrier()


@on_ranks(3)
def test_the_groups_split_group_method_excludes_the_other_ranks():
    rank = dist.get_rank()
    group = dist.group.WORLD.split_group([0, 2], group_name="mine", timeout=datetime.timedelta(seconds=20))
    if rank == 1:
        assert group is None
    else:
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        assert float(tensor) == 2.0
        assert group.group_name == "mine"
        group.shutdown()
    with pytest.raises(ValueError, match="not different ranks"):
        dist.group.WORLD.split_group([0, 0])
    dist.barrier()


@on_ranks(2)
def test_the_default_group_can_be_made_again_in_the_same_process():
    for _ in range(3):
        again()
        assert ranks_sum() == 1


@on_ranks(2)
def test_a_group_can_be_made_again_over_the_same_store():
    rank, size = dist.get_rank(), dist.get_world_size()
    name = [f"/tmp/smddp-same-store-{os.getpid()}"]
    dist.broadcast_object_list(name, src=0)
    store = dist.FileStore(name[0], size)
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group(
            "smddp", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=30)
        )
        assert ranks_sum() == 1
    again()


@on_ranks(2)
def test_destroyed_groups_are_collected():
    import gc
    import weakref

    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    watched = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert watched() is None


def sockets() -> int:
    """Returns the number of open sockets of this process."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry.path))
    return sum(link.startswith("socket:") for link in links)


@on_ranks(2)
def test_a_destroyed_group_that_is_still_referenced_has_no_connection():
    # Opens the sockets that a process opens only once.
    dist.send(torch.ones(1), 1) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)
    dist.barrier()
    before = sockets()
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    for group in groups:
        dist.all_reduce(torch.ones(1000), group=group)
    for group in groups:
        dist.destroy_process_group(group)
    until = time.monotonic() + 20
    while sockets() > before:
        assert time.monotonic() < until, f"{sockets()} sockets, {before} before"
        time.sleep(0.01)
    dist.barrier()


@on_ranks(2)
def test_threads_may_share_a_group_or_use_separate_ones():
    """Calls of threads on one group need the same order on all ranks, so each thread has its own group here.

    Messages of the shared group are separated by tags.
    """
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for step in range(20):
                tensor = torch.full((100,), float(rank + index + step))
                dist.all_reduce(tensor, group=groups[index])
                same(tensor, torch.full((100,), float(1 + 2 * (index + step))))
                if rank == 0:
                    dist.send(tensor, 1, tag=index)
                else:
                    dist.recv(got := torch.empty(100), 0, tag=index)
                    same(got, tensor)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for group in groups:
        dist.destroy_process_group(group)


@on_ranks(2)
def test_a_collective_in_a_forked_child_raises_without_effect_on_the_parent():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing"
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            said = str(error).encode()
        dist.destroy_process_group()
        os.write(write, said)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    assert "forked" in said and str(os.getpid()) in said, said
    assert ranks_sum() == 1


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


@on_ranks(2)
def test_dataloader_workers_may_be_forked_after_init():
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.cat(list(loader)).tolist() == [i * i for i in range(8)]
    assert ranks_sum() == 1


@on_ranks(2)
def test_a_missing_rank_ends_the_call_at_the_deadline():
    # creating the group has the same timeout, so all ranks start together
    dist.barrier()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 0:
        start = time.monotonic()
        # torch's own tests search for one of these words between spaces
        with pytest.raises(RuntimeError, match=r" (Timed out|closed|timeout) "):
            dist.barrier(group)
        assert 1.9 < time.monotonic() - start < 10
    dist.barrier()
    dist.destroy_process_group(group)
    assert ranks_sum() == 1


@on_ranks(3)
def test_the_missing_ranks_are_named():
    import smddp

    group = dist.new_group([0, 2])
    if dist.get_rank() == 2:
        group.set_timeout(datetime.timedelta(seconds=0.5))
        with pytest.raises(smddp.CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(1), group=group)
        assert caught.value.ranks == [0]
        assert "0=0, 1=2" in str(caught.value)
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_does_not_create_the_group_is_named():
    from smddp.torch.rendezvous import connect

    if dist.get_rank() == 0:
        store = dist.HashStore()
        with pytest.raises(
            RuntimeError,
            match=r"Timed out waiting 200ms: ranks 0, 2 did not join group 'lonely' within 0.2 s \(1 of 3"
            r".*0=5, 1=6, 2=7",
        ) as caught:
            connect(store, "init_process_group", "lonely", 1, 3, 0.2, [5, 6, 7])
        assert caught.value.ranks == [5, 7]
        assert not store.check(["smddp/card/1"])
    dist.barrier()


@on_ranks(2)
def test_timeouts_can_be_set_for_a_group_and_a_call():
    group = dist.new_group([0, 1])
    group.set_timeout(datetime.timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            group.allreduce([torch.ones(1)]).wait()
        assert time.monotonic() - start < 10
    dist.barrier()
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = group.recv([torch.empty(1)], 1, 0)
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            work.wait(datetime.timedelta(seconds=0.3))
        assert time.monotonic() - start < 10
    dist.barrier()


@on_ranks(2)
def test_a_group_without_a_timeout_has_that_of_the_default_group():
    minutes = datetime.timedelta(minutes=30)
    world = dist.group.WORLD
    before = world._timeout
    world.set_timeout(datetime.timedelta(seconds=41))
    try:
        for ranks in (None, [0, 1], [dist.get_rank()]):
            groups = [
                dist.new_group(ranks, use_local_synchronization=ranks is not None),
                dist.new_group(ranks, minutes, use_local_synchronization=ranks is not None),
            ]
            assert [group._timeout for group in groups] == [world._timeout, minutes]
            for group in groups:
                dist.destroy_process_group(group)
        mesh = dist.init_device_mesh("cpu", (1, 2))
        assert mesh.get_group(1)._timeout == world._timeout
    finally:
        world.set_timeout(before)


@on_ranks(2)
def test_abort_wakes_the_groups_waiters_and_no_other_group():
    group = dist.new_group([0, 1])
    dist.barrier()
    if dist.get_rank() == 0:
        work = group.recv([torch.empty(1)], 1, 0)
        threading.Timer(0.2, group.abort).start()
        with pytest.raises(RuntimeError):
            work.wait()
    dist.barrier()
    assert ranks_sum() == 1


@on_ranks(3)
def test_monitored_barrier_names_the_missing_ranks_in_torchs_words():
    rank = dist.get_rank()
    group = dist.group.WORLD
    short = datetime.timedelta(seconds=0.5)
    group.monitored_barrier()
    group.monitored_barrier(wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"Ranks 1, 2 failed to pass monitoredBarrier in 500 ms"):
            group.monitored_barrier(short, wait_all_ranks=True)
    dist.barrier()
    subgroup = dist.new_group([0, 1, 2])
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            subgroup.monitored_barrier(short)
    elif rank == 2:
        with pytest.raises(RuntimeError, match="Rank 2 successfully reached monitoredBarrier, but received errors"):
            subgroup.monitored_barrier(short)
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            subgroup.monitored_barrier(datetime.timedelta(0))
    assert ranks_sum() == 3


@on_ranks(2)
def test_monitored_barrier_works_after_the_store_has_exited():
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    short = datetime.timedelta(seconds=0.3)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, 0)
    store = server or dist.TCPStore("127.0.0.1", port[0], is_master=False)
    group._monitored._store = dist.PrefixStore("group", store)
    group.monitored_barrier()
    if rank == 0:
        # A rank of another host would get a closed connection; here the rank's process runs the server.
        group._monitored._store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port[0], is_master=False))
        del server, store
    dist.barrier()
    group.monitored_barrier()
    group.monitored_barrier(wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 300 ms"):
            group.monitored_barrier(short)
    dist.barrier()


@on_ranks(2)
def test_detail_debug_mode_is_served():
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        again()
        group = dist.new_group([0, 1])
        assert ranks_sum(group) == 1
        assert ranks_sum() == 1
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
        again()


@on_ranks(2)
def test_a_device_of_another_backend_is_served_by_it():
    again(backend="cpu:gloo,meta:smddp")
    world = dist.group.WORLD
    assert ranks_sum() == 1
    # creating the group is counted as one call
    assert world.communicator.sequence() <= 1, "the core moved what gloo should have moved"
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1, device="meta"))
    group = dist.new_group([0, 1])
    assert ranks_sum(group) == 1
    gathered = [None, None]
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == [0, 1]
    again(backend="cpu:smddp")
    assert ranks_sum() == 1
    assert [device.type for device in dist.group.WORLD._device_types] == ["cpu"]
    again()


@on_ranks(2)
def test_a_device_whose_backend_cannot_be_created_is_named():
    if torch.cuda.is_available():
        pytest.skip("nccl can be made here")
    from smddp.torch.device_map import Request, others

    with pytest.raises(RuntimeError, match=r"could not make 'nccl' for 'cuda'"):
        others(
            Request({"cpu": "smddp", "cuda": "nccl"}),
            dist.HashStore(),
            0,
            1,
            datetime.timedelta(seconds=5),
            "mixed",
            [0],
        )


@on_ranks(2)
def test_a_group_reports_its_name_rank_and_size():
    world = dist.group.WORLD
    assert dist.get_backend() == "smddp"
    assert dist.is_backend_available("smddp")
    assert world._get_backend_name() == world.name() == "smddp"
    assert world.rank() == dist.get_rank() and world.size() == 2
    assert torch.device("cpu") in world._device_types
    before = world._get_sequence_number_for_group()
    dist.barrier()
    assert world._get_sequence_number_for_group() == before + 1
    assert dist.get_process_group_ranks(world) == [0, 1]


@on_ranks(2)
def test_the_profiler_sees_every_kind_of_call():
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2))
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
        dist.barrier()
        sent = dist.isend(torch.ones(1), (rank + 1) % size)
        dist.recv(torch.empty(1), (rank - 1) % size)
        sent.wait()
    names = {event.key for event in profile.key_averages()}
    assert names >= {
        "smddp:all_reduce",
        "smddp:all_gather_single",
        "smddp:reduce_scatter_single",
        "smddp:broadcast",
        "smddp:barrier",
        "smddp:send",
        "smddp:recv",
    }, names
