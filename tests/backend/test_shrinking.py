"""`dist.shrink_group`: some ranks of a group form a new one without the help of the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.group import BACKEND
from torch.distributed import distributed_c10d as dist_c10d

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="other backends shrink in their own way")


def backend_of(group):
    return group._get_backend(torch.device("cpu"))


def needs_shrinking() -> None:
    if not (hasattr(dist, "shrink_group") and getattr(backend_of(dist.group.WORLD), "supports_shrinking", False)):
        pytest.skip("this torch shrinks no group of a backend in Python")


def assert_adds_up(group, world_ranks: list[int]) -> None:
    assert (group.size(), group.rank()) == (len(world_ranks), world_ranks.index(dist.get_rank()))
    assert dist.get_process_group_ranks(group) == world_ranks
    mine = torch.tensor([dist.get_rank()])
    dist.all_reduce(mine, group=group)
    assert int(mine) == sum(world_ranks)
    dist.broadcast(mine.fill_(dist.get_rank()), world_ranks[-1], group=group)
    assert int(mine) == world_ranks[-1]


@on_ranks(4)
def test_a_shrunk_group_has_the_remaining_ranks_in_order_and_all_features():
    """The excluded ranks are ranks of the group, which differ from the global ranks."""
    me, group = dist.get_rank(), dist.new_group([1, 2, 3])
    needs_shrinking()
    if me in (1, 3):
        shrunk = dist.shrink_group([1], group)
        assert type(shrunk) is type(dist.group.WORLD)
        assert_adds_up(shrunk, [1, 3])
        with pytest.raises((ValueError, dist.DistBackendError)):
            dist.all_reduce(torch.ones(1), group=group)
        single = dist.shrink_group([0], shrunk) if me == 3 else None
        if single is not None:
            assert_adds_up(single, [3])
            dist.destroy_process_group(single)
        else:
            with pytest.raises(dist.DistBackendError, match="left the group"):
                dist.all_reduce(torch.ones(1), group=shrunk)
            dist.destroy_process_group(shrunk)
    elif me == 2:
        # No rank waits for the others: they have left.
        with pytest.raises(dist.DistBackendError, match="left the group"):
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    # All ranks agree on the name of the next group.
    again = dist.new_group()
    assert_adds_up(again, [0, 1, 2, 3])
    dist.destroy_process_group(again)


@on_ranks(3)
def test_pending_calls_fail_and_never_reach_the_shrunk_group():
    me = dist.get_rank()
    needs_shrinking()
    for flags in (dist_c10d.SHRINK_DEFAULT, dist_c10d.SHRINK_ABORT):
        group = dist.new_group()
        if me != 1:
            waiting = dist.all_reduce(torch.ones(4), group=group, async_op=True)
            shrunk = dist.shrink_group([1], group, flags)
            with pytest.raises(dist.DistBackendError):
                waiting.wait()
            assert_adds_up(shrunk, [0, 2])
            dist.destroy_process_group(shrunk)
        dist.barrier()
        if me == 1:
            dist.destroy_process_group(group)


@on_ranks(2)
def test_invalid_arguments_are_refused_and_the_group_stays_usable():
    me, group = dist.get_rank(), dist.new_group()
    needs_shrinking()
    for wrong, kind, why in [
        ([], ValueError, "cannot be empty"),
        ((1 - me,), TypeError, "must be a list"),
        ([2], ValueError, "out of bounds"),
        ([1 - me, 1 - me], ValueError, "Duplicate"),
        ([0, 1], ValueError, "all 2 ranks"),
        ([me], RuntimeError, "in the exclusion list"),
    ]:
        with pytest.raises(kind, match=why):
            dist.shrink_group(wrong, group)
        if isinstance(wrong, list):
            with pytest.raises(ValueError, match="shrink: "):
                backend_of(group).shrink(wrong)
    with pytest.raises(ValueError, match="shrink_flags"):
        dist.shrink_group([1 - me], group, 2)
    with pytest.raises(ValueError, match="SHRINK_ABORT"):
        backend_of(group).shrink([1 - me], 2)
    assert_adds_up(group, [0, 1])
    dist.destroy_process_group(group)


@on_ranks(2)
def test_the_error_of_a_group_with_several_backends_names_the_remedy():
    group = dist.new_group(backend="cpu:smddp,cuda:gloo")
    needs_shrinking()
    assert backend_of(group).supports_shrinking is False
    with pytest.raises(RuntimeError, match="use_local_synchronization"):
        backend_of(group).shrink([1 - dist.get_rank()])
    dist.destroy_process_group(group)
