"""Reconfiguration of a group by torch's contract for fault tolerance: other ranks in the same object."""

from __future__ import annotations

import datetime
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from torch.distributed import distributed_c10d as dist_c10d

LIMIT = datetime.timedelta(seconds=30)
_numbers = itertools.count(1)


def handles_of(group) -> list[str]:
    """Returns the handles of all ranks of the world."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, group.get_reconfigure_handle())
    return found


def again(group, handles, uuid=None, timeout=LIMIT, hints=None) -> None:
    from smddp.torch.reconfigure import ReconfigureOptions

    uuid = next(_numbers) if uuid is None else uuid
    group.reconfigure(ReconfigureOptions(uuid, handles, timeout, hints or {})).wait()


def assert_adds_up(group, world_ranks: list[int]) -> None:
    """Asserts that the group consists of these global ranks in that order."""
    assert (group.size(), group.rank()) == (len(world_ranks), world_ranks.index(dist.get_rank()))
    mine = torch.tensor([dist.get_rank()])
    every = [torch.empty_like(mine) for _ in world_ranks]
    dist.all_gather(every, mine, group=group)
    assert [int(each) for each in every] == world_ranks
    assert dist.get_process_group_ranks(group) == world_ranks
    # The root is a global rank.
    dist.broadcast(mine, world_ranks[-1], group=group)
    assert int(mine) == world_ranks[-1]


@on_ranks(3)
def test_a_list_defines_the_order_and_a_set_keeps_it():
    group, me = dist.new_group(), dist.get_rank()
    handles = handles_of(group)
    again(group, [handles[rank] for rank in (2, 0, 1)])
    assert_adds_up(group, [2, 0, 1])
    again(group, set(handles_of(group)))
    assert_adds_up(group, [2, 0, 1])
    handles = handles_of(group)
    # Splits the members into two separate configurations.
    if me == 1:
        again(group, [handles[1]], uuid=100)
        assert_adds_up(group, [1])
    else:
        again(group, {handles[0], handles[2]}, uuid=101)
        assert_adds_up(group, [2, 0])
    again(group, handles, uuid=102)
    assert_adds_up(group, [0, 1, 2])
    dist.destroy_process_group(group)


@on_ranks(3)
def test_references_to_the_group_use_its_new_ranks():
    """DDP divides by the current number of ranks; a pending call fails and receives no later data."""
    group, me = dist.new_group(), dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
    handles = handles_of(group)
    if me == 2:
        again(group, [handles[2]], uuid=201)
    else:
        waiting = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        again(group, handles[:2], uuid=200)
        with pytest.raises(dist.DistBackendError):
            waiting.wait()
        assert_adds_up(group, [0, 1])
    with torch.no_grad():
        model.module.weight.fill_(1.0)
    model(torch.full((1, 1), float(me + 1))).sum().backward()
    asked = dist.ProcessGroup.size(group) == group.size()  # an older torch divides by 3 ranks, with a warning
    assert float(model.module.weight.grad) == pytest.approx((3.0 if me == 2 else 1.5) if asked else 1.0)
    again(group, handles_of(group), uuid=202)
    assert_adds_up(group, [0, 1, 2])
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_torch_that_keeps_the_old_number_of_ranks_causes_a_warning():
    group = dist.new_group()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again(group, handles_of(group)[::-1], uuid=260)
        assert not caught, "the number of ranks is unchanged"
        again(group, [group.get_reconfigure_handle()], uuid=261 + dist.get_rank())
    warned = [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]
    if dist.ProcessGroup.size(group) == 1:
        assert not warned, "this torch asks the group"
    else:
        assert len(warned) == 1 and "continues with 2 ranks where this group has 1" in warned[0], warned
    dist.destroy_process_group(group)


@on_ranks(2)
def test_hooks_remain_registered():
    group, hooked = dist.new_group(), []
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        pytest.skip("this torch has no such hooks")
    group.register_pre_hook(1, lambda args: hooked.append(args.name))
    dist.all_reduce(torch.ones(1), group=group)
    before = len(hooked)
    again(group, handles_of(group)[::-1], uuid=250)
    dist.all_reduce(torch.ones(1), group=group)
    assert len(hooked) == 2 * before > 0, hooked
    assert_adds_up(group, [1, 0])
    dist.destroy_process_group(group)


@on_ranks(3)
def test_reconfigure_succeeds_after_an_abort_and_a_failed_attempt():
    group, me = dist.new_group(), dist.get_rank()
    handles = handles_of(group)
    group.abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1), group=group)
    if me != 0:
        # Rank 0 is missing.
        with pytest.raises(dist.DistBackendError, match="rank 0 did not join group"):
            again(group, handles, uuid=300, timeout=datetime.timedelta(seconds=1))
        with pytest.raises(dist.DistBackendError, match="reconfiguration 300 failed"):
            dist.all_reduce(torch.ones(1), group=group)
    again(group, handles_of(group), uuid=301)
    assert_adds_up(group, [0, 1, 2])
    dist.destroy_process_group(group)


@on_ranks(2)
def test_invalid_arguments_are_refused_and_the_group_is_unchanged():
    group = dist.new_group()
    handles = handles_of(group)
    again(group, handles, uuid=400)
    mine, other = handles[dist.get_rank()], handles[1 - dist.get_rank()]
    with pytest.raises(RuntimeError, match="already used"):
        again(group, handles, uuid=400)
    for wrong, why in [
        ([other], "not among"),
        ([], "not among"),
        ([mine, mine, other], "duplicate handle"),
        ([mine, "gloo:1"], "invalid handle"),
    ]:
        with pytest.raises(ValueError, match=why):
            again(group, wrong, uuid=401)
    with pytest.raises(ValueError, match="0 or more"):
        again(group, handles, uuid=-1)
    with pytest.raises(ValueError, match="HOST:PORT"):
        again(group, handles, uuid=402, hints={"store": "nowhere"})
    with pytest.raises(ValueError, match="unknown hints"):
        again(group, handles, uuid=403, hints={"stor": "127.0.0.1:1"})
    assert_adds_up(group, [0, 1])
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_hinted_store_replaces_a_failed_group_store():
    group = dist.new_group()
    addresses = [None, None]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 1 else None
    dist.all_gather_object(addresses, f"127.0.0.1:{server.port}" if server is not None else None)
    handles = handles_of(group)

    class Failed:
        def __getattr__(self, name: str) -> None:
            raise RuntimeError("the store has failed")

    group._group_store = Failed()
    again(group, handles, uuid=500, hints={"store": addresses[1]})
    assert_adds_up(group, [0, 1])
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks(2)
def test_calls_of_a_group_without_ranks_name_the_reason():
    if not hasattr(dist, "_reconfigure"):
        pytest.skip("this torch makes no groups with enable_reconfigure")
    from smddp.torch.device_map import Request
    from smddp.torch.process_group import SmddpProcessGroup

    store = dist.PrefixStore("first", dist_c10d._get_default_store())
    rank = dist.get_rank()
    group = SmddpProcessGroup(
        store=store,
        group_store=store,
        rank=rank,
        size=2,
        timeout=LIMIT,
        name="first",
        global_ranks=[],
        request=Request(),
        connected=False,
    )
    with pytest.raises(dist.DistBackendError, match="has no ranks yet"):
        group.allreduce([torch.ones(1)])
    dist._reconfigure(600, handles_of(group), group, LIMIT).wait()
    found = torch.ones(3)
    group.allreduce([found]).wait()
    assert found.tolist() == [2.0] * 3
    # A requested abort is not an error of the group.
    group.abort()
    assert group.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    dist.barrier()
