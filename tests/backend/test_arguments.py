"""Invalid arguments raise an error with both values before any transfer, and the group stays usable."""

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from ranks.errors import refused

from backend.oracle import same


def group_still_works() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), float(dist.get_world_size())))


@on_ranks(2)
def test_mismatched_sizes_are_named():
    world = dist.group.WORLD
    with refused("(5,)", "(3,)", "5 elements"):
        dist.all_gather_into_tensor(torch.empty(5), torch.ones(3))
    with refused("(5,)", "(2,)"):
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(5))
    with refused("one entry for each of the 2 ranks", "got 3"):
        dist.all_gather([torch.empty(2)] * 3, torch.ones(2))
    with refused("(3,)", "(2,)"):
        dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(2))
    with refused("one entry for each", "got 1"):
        dist.reduce_scatter(torch.empty(2), [torch.ones(2)])
    with refused("(3,)", "(2,)"):
        dist.reduce_scatter(torch.empty(2), [torch.ones(3), torch.ones(3)])
    with refused("dim 0 does not divide equally"):
        dist.all_to_all_single(torch.empty(3), torch.ones(3))
    with refused("Number of tensor splits not equal to group size"):
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 1, 1], [1, 2])
    with refused("doesn't match total dim 0 size", "[1, 1]"):
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [1, 1])
    with refused("got 1"):
        world.alltoall([torch.empty(1)], [torch.ones(1)])
    with refused("(2,)", "(3,)"):
        dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(3), torch.ones(3)])
    with refused("one tensor a call", "got 2"):
        world.allreduce([torch.ones(1), torch.ones(1)])
    group_still_works()


@on_ranks(2)
def test_roots_and_peers_outside_the_group_are_refused():
    rank = dist.get_rank()
    world = dist.group.WORLD
    with refused("invalid root rank 7 in a group of 2"):
        world.broadcast(torch.ones(1), 7)
    with refused("invalid root rank -1"):
        world.reduce(torch.ones(1), -1)
    with refused("invalid rank 5"):
        world.send([torch.ones(1)], 5, 0)
    with refused("negative", "-3"):
        world.recv([torch.ones(1)], 1 - rank, -3)
    outputs = [torch.empty(1), torch.empty(1)]
    with refused("root"):
        world.gather([] if rank == 0 else [outputs], [torch.ones(1)])
    with refused("root"):
        world.scatter([torch.empty(1)], [] if rank == 0 else [outputs])
    group_still_works()


@on_ranks(2)
def test_mixed_types_and_devices_are_refused():
    with refused("float32", "float64", kind=(TypeError, ValueError)):
        dist.all_gather_into_tensor(torch.empty(4, dtype=torch.float64), torch.ones(2))
    with refused("float32", "int64", kind=TypeError):
        dist.group.WORLD.allgather([[torch.empty(2), torch.empty(2, dtype=torch.int64)]], [torch.ones(2)])
    with refused("meta", "cpu"):
        dist.all_gather_into_tensor(torch.empty(4, device="meta"), torch.ones(2))
    with refused("meta", "cpu:smddp,meta:BACKEND", kind=RuntimeError):
        dist.all_reduce(torch.empty(4, device="meta"))
    with refused("layout", "sparse_coo"):
        dist.broadcast(torch.eye(2).to_sparse(), 0)
    group_still_works()


@on_ranks(2)
def test_outputs_with_overlapping_elements_are_refused():
    with refused("several elements in one place"):
        dist.all_reduce(torch.ones(1).expand(4))
    with refused("several elements in one place"):
        dist.all_gather_into_tensor(torch.empty(1).expand(4), torch.ones(2))
    with refused("several elements in one place"):
        dist.group.WORLD.allreduce_coalesced([torch.ones(3), torch.ones(1).expand(4)])
    group_still_works()


@on_ranks(2)
def test_tensors_without_memory_are_refused():
    freed = torch.ones(6)
    freed.untyped_storage().resize_(0)
    # The group's methods: torch.distributed's functions print the arguments of a failed call, which can crash here.
    world = dist.group.WORLD
    with refused("(6,)", "no memory"):
        world.allreduce([freed])
    with refused("(6,)", "no memory"):
        world.alltoall_base(torch.empty(6), freed, [3, 3], [3, 3])
    dist.all_reduce(torch.empty(0))
    group_still_works()


@on_ranks(2)
def test_calls_after_a_failure_in_a_coalescing_block_are_made():
    world = dist.group.WORLD
    with pytest.raises(ValueError, match="invalid root"), dist._coalescing_manager(world, torch.device("cpu")):
        world.broadcast(torch.ones(1), 9)
    group_still_works()
    with pytest.raises(ValueError, match="elements"), dist._coalescing_manager(world):
        dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
    group_still_works()


@on_ranks(2)
def test_a_destroyed_group_refuses_calls():
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError):
        group.allreduce(torch.ones(1))
    with pytest.raises(RuntimeError):
        group.send([torch.ones(1)], 1 - dist.get_rank(), 0)
    group_still_works()


@on_ranks(2)
def test_errors_are_subclasses_of_torchs_and_smddps_classes():
    import smddp

    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    with pytest.raises(dist.DistBackendError):
        group.barrier()
    with pytest.raises(smddp.ClosedError):
        group.barrier()
    dist.barrier()
