"""Sends and receives."""

import torch
import torch.distributed as dist

from backend.oracle import MOVING, contribution, same
from backend.ranks import on_ranks


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
def test_tags_keep_messages_apart():
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
def test_a_receive_from_any_source_tells_who_sent():
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
def test_any_source_of_a_subgroup_is_told_as_a_global_rank():
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
def test_strided_messages_arrive_as_their_elements():
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
def test_collectives_pass_between_a_send_and_its_receive():
    """Messages and collectives are numbered apart."""
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
def test_objects_go_from_rank_to_rank():
    if dist.get_rank() == 0:
        dist.send_object_list(["a", {"b": 1}], 1)
    else:
        listed = [None, None]
        dist.recv_object_list(listed, 0)
        assert listed == ["a", {"b": 1}]
