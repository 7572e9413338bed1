"""Sends and receives."""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from smddp import ClosedError, CollectiveTimeoutError, MismatchError

from backend.oracle import MOVING, contribution, same


def ring() -> tuple[int, int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, (rank + 1) % size, (rank - 1) % size


@on_ranks(2, 3)
def test_messages_go_round_in_every_type_and_size():
    rank, right, left = ring()
    for dtype in MOVING:
        for count in (0, 1, 1000) if dtype == torch.float32 else (3,):
            sent = dist.group.WORLD.send([contribution(rank, count, dtype)], right, 0)
            tensor = torch.empty(count, dtype=dtype)
            dist.group.WORLD.recv([tensor], left, 0).wait()
            sent.wait()
            same(tensor, contribution(left, count, dtype))
    big = torch.empty(500_000)
    sent = dist.isend(contribution(rank, 500_000, torch.float32), right)
    dist.recv(big, left)
    sent.wait()
    same(big, contribution(left, 500_000, torch.float32))


@on_ranks(2)
def test_tags_separate_messages():
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (5, 6, 7)]
        for work in works:
            work.wait()
    else:
        for tag in (7, 5, 6):
            tensor = torch.empty(2)
            dist.recv(tensor, 0, tag=tag)
            same(tensor, torch.full((2,), float(tag)))


@on_ranks(2)
def test_messages_of_one_tag_keep_their_order():
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(i)]), 1) for i in range(20)]
        for work in works:
            work.wait()
    else:
        tensors = [torch.empty(1) for _ in range(20)]
        works = [dist.irecv(tensor, 0) for tensor in tensors]
        for work in works:
            work.wait()
        assert [float(tensor) for tensor in tensors] == [float(i) for i in range(20)]


@on_ranks(2, 3)
def test_a_receive_from_any_source_returns_the_sender():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            tensor = torch.empty(1)
            source = dist.recv(tensor)
            assert float(tensor) == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0)
    dist.barrier()


@on_ranks(3)
def test_any_source_of_a_subgroup_returns_a_global_rank():
    rank = dist.get_rank()
    group = dist.new_group([2, 1])
    if rank == 2:
        tensor = torch.empty(1)
        assert dist.recv(tensor, group=group) == 1
        assert float(tensor) == 1.0
    elif rank == 1:
        dist.send(torch.ones(1), 2, group=group)
    dist.barrier()


@on_ranks(2, 3)
def test_a_batch_of_sends_and_receives_does_not_depend_on_its_order():
    rank, right, left = ring()
    for reverse in (False, True):
        got = [torch.empty(4), torch.empty(300_000)]
        ops = [
            dist.P2POp(dist.irecv, got[0], left),
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), right),
            dist.P2POp(dist.irecv, got[1], left, tag=1),
            dist.P2POp(dist.isend, torch.full((300_000,), float(rank)), right, tag=1),
        ]
        if reverse:
            ops = ops[::-1]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for tensor in got:
            assert bool((tensor == left).all())


@on_ranks(2)
def test_strided_messages_deliver_their_elements():
    rank = dist.get_rank()
    tensor = torch.zeros(4, 2)
    if rank == 0:
        dist.send(contribution(0, 8, torch.float32).view(4, 2)[:, 1], 1)
    else:
        dist.recv(tensor[:, 0], 0)
        same(tensor[:, 0].contiguous(), contribution(0, 8, torch.float32).view(4, 2)[:, 1].contiguous())
        same(tensor[:, 1].contiguous(), torch.zeros(4))


@on_ranks(1, 2)
def test_a_rank_may_send_to_itself():
    rank = dist.get_rank()
    sent = dist.isend(torch.full((3,), 7.0), rank)
    tensor = torch.empty(3)
    dist.irecv(tensor, rank).wait()
    sent.wait()
    same(tensor, torch.full((3,), 7.0))


@on_ranks(2)
def test_collectives_are_possible_between_a_send_and_its_receive():
    """Messages and collectives have separate sequence numbers."""
    rank = dist.get_rank()
    if rank == 0:
        work = dist.isend(torch.ones(2), 1)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.recv(tensor := torch.empty(2), 0)
        same(tensor, torch.ones(2))
    else:
        work.wait()


@on_ranks(2)
def test_objects_are_sent_between_ranks():
    if dist.get_rank() == 0:
        dist.send_object_list(["a", {"b": 1}], 1)
    else:
        listed = [None, None]
        dist.recv_object_list(listed, 0)
        assert listed == ["a", {"b": 1}]


@on_ranks(1, 2)
def test_a_message_to_the_own_rank_arrives_in_a_leaf_that_requires_grad():
    rank = dist.get_rank()
    for buffer in (torch.zeros(4, requires_grad=True), torch.zeros(2, 2, requires_grad=True)):
        work = dist.irecv(buffer, rank)
        dist.isend(torch.full((4,), 3.0), rank).wait()
        work.wait()
        assert torch.equal(buffer.detach().view(-1), torch.full((4,), 3.0))


@on_ranks(1)
def test_a_receive_from_the_own_rank_whose_wait_timed_out_is_still_the_first_in_line():
    first, second = torch.zeros(2), torch.zeros(2)
    early = dist.irecv(first, 0, tag=5)
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="the call goes on"):
            early.wait(datetime.timedelta(seconds=0.05))
    assert not early.is_completed()
    dist.isend(torch.full((2,), 7.0), 0, tag=5).wait()
    dist.isend(torch.full((2,), 8.0), 0, tag=5).wait()
    early.wait()
    dist.irecv(second, 0, tag=5).wait()
    assert first.tolist() == [7.0, 7.0] and second.tolist() == [8.0, 8.0]


@on_ranks(1)
def test_errors_of_messages_to_the_own_rank_name_operation_number_group_rank_and_host():
    group = dist.new_group([0], timeout=datetime.timedelta(seconds=0.05))
    seen = []

    def note(call):
        with pytest.raises((CollectiveTimeoutError, MismatchError, ClosedError)) as caught:
            call()
        seen.append(str(caught.value))

    late = dist.irecv(torch.zeros(2), 0, group=group)
    note(lambda: late.wait(datetime.timedelta(seconds=0.01)))
    note(late.wait)
    dist.isend(torch.zeros(3), 0, group=group)
    note(dist.irecv(torch.zeros(2), 0, group=group).wait)
    group.set_timeout(datetime.timedelta(seconds=20))
    pending = dist.irecv(torch.zeros(2), 0, group=group)
    group.abort()
    note(pending.wait)
    for text in seen:
        assert re.search(
            r"recv #\d from rank 0, this rank, with tag 0 on group `\S+` .*rank 0 \(host .+, pid \d+\)", text
        )
    note(lambda: group.recv([torch.zeros(2)], 0, 0))
    assert re.search(r"group `\S+` is closed: rank 0 \(host .+, pid \d+\)", seen[-1])


@on_ranks(1)
def test_a_receive_from_the_own_rank_ends_at_its_deadline_without_a_wait():
    group = dist.new_group([0], timeout=datetime.timedelta(seconds=0.05))
    first, second = torch.zeros(2), torch.zeros(2)
    late = [dist.irecv(each, 0, group=group) for each in (first, torch.zeros(2))]
    while not late[0].is_completed():
        time.sleep(0.01)
    dist.isend(torch.full((2,), 7.0), 0, group=group)
    assert late[1].is_completed() and not late[1].is_success()
    dist.irecv(second, 0, group=group).wait()
    assert first.tolist() == [0.0, 0.0] and second.tolist() == [7.0, 7.0]


@on_ranks(2)
def test_a_receive_whose_wait_timed_out_receives_the_next_message():
    """wait(timeout) ends the wait, not the receive: the next message completes it, and a second wait returns."""
    if dist.get_rank() == 0:
        first, second = torch.zeros(2), torch.zeros(2)
        work = dist.irecv(first, 1, tag=5)
        with pytest.raises(CollectiveTimeoutError, match="wait again"):
            work.wait(datetime.timedelta(seconds=0.05))
        dist.barrier()
        work.wait()
        dist.recv(second, 1, tag=5)
        assert first.tolist() == [1.0, 1.0] and second.tolist() == [2.0, 2.0]
    else:
        dist.barrier()
        dist.send(torch.full((2,), 1.0), 0, tag=5)
        dist.send(torch.full((2,), 2.0), 0, tag=5)
