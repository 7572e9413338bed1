"""Layers of torch that call the group from C++ or through a compiler."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks.cases import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backend.oracle import contribution, same


@on_ranks(2)
def test_functional_collectives_return_new_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    mine = contribution(rank, 4, torch.float32)
    everyone = [contribution(r, 4, torch.float32) for r in range(size)]
    same(functional.all_reduce(mine, "sum", group) + 0, sum(everyone))
    same(functional.all_reduce(mine, "avg", group) + 0, sum(everyone) / size)
    same(functional.all_gather_tensor(mine, 0, group) + 0, torch.cat(everyone))
    same(functional.reduce_scatter_tensor(mine, "sum", 0, group) + 0, sum(everyone)[rank * 2 : rank * 2 + 2])
    same(functional.broadcast(mine, 1, group) + 0, everyone[1])
    same(
        functional.all_to_all_single(mine, None, None, group) + 0,
        torch.cat([t[rank * 2 : rank * 2 + 2] for t in everyone]),
    )
    reduced = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    same(reduced[1] + 0, sum(everyone) * 2)
    gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    same(gathered[1] + 0, torch.cat([t[:1] for t in everyone]))
    scattered = functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], group)
    same(scattered[0] + 0, sum(everyone)[rank * 2 : rank * 2 + 2])


@on_ranks(2)
def test_functional_collectives_have_gradients():
    rank, size = dist.get_rank(), dist.get_world_size()
    leaf = torch.full((2,), float(rank + 1), requires_grad=True)
    gathered = functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    (gathered * torch.arange(4.0)).sum().backward()
    same(leaf.grad, torch.arange(4.0).view(2, 2)[rank] * size)


@on_ranks(2, seconds=120)
def test_compiled_functions_communicate():
    rank, size = dist.get_rank(), dist.get_world_size()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor):
        total = functional.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)

    total = 2 * sum(contribution(r, 3, torch.float32) for r in range(size)) + 1
    same(step(contribution(rank, 3, torch.float32)) + 0, torch.cat([total] * size))

    @torch.compile(backend="aot_eager")
    def in_place(tensor):
        dist.all_reduce(tensor)
        return tensor + 1

    same(in_place(torch.ones(2)) + 0, torch.full((2,), float(size + 1)))


@on_ranks(2)
def test_meshes_and_dtensors_redistribute():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    same(sharded.full_tensor(), full)
    same(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), full)
    product = sharded @ distribute_tensor(torch.eye(3), mesh, [Replicate()])
    same(product.full_tensor(), full)
    total = sharded.sum()
    same(total.full_tensor(), full.sum())


@on_ranks(2)
def test_fsdp2_trains_as_one_process_would():
    def run(shard: bool) -> list[float]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 2))
        if shard:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        found = []
        for step in range(3):
            loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    for ours, alone in zip(run(True), run(False), strict=True):
        assert abs(ours - alone) < 1e-6


@on_ranks(2)
def test_results_of_functional_collectives_are_accepted_as_arguments():
    """torch's dispatcher waits for them and unwraps them; direct calls of a smddp group bypass it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    mine = contribution(rank, 4, torch.float32)
    everyone = [contribution(r, 4, torch.float32) for r in range(size)]
    total = functional.all_reduce(mine, "sum", group)
    dist.all_reduce(total)
    same(total + 0, sum(everyone) * size)
    output = torch.empty(size * 4)
    dist.all_gather_into_tensor(output, functional.all_gather_tensor(mine, 0, group)[rank * 4 : rank * 4 + 4])
    same(output, torch.cat(everyone))
    outputs = [torch.empty(4) for _ in range(size)]
    dist.all_gather(outputs, functional.all_reduce(mine, "sum", group))
    same(outputs[0], sum(everyone))
    sent = functional.all_reduce(mine, "sum", group)
    work = dist.isend(sent, 1 - rank)
    got = torch.empty(4)
    dist.recv(got, 1 - rank)
    work.wait()
    same(got, sum(everyone))
    several = [functional.all_reduce(mine, "sum", group) for _ in range(2)]
    dist.all_reduce_coalesced(several)
    same(several[1] + 0, sum(everyone) * size)


@on_ranks(2)
def test_dtensor_changes_the_sharded_dimension():
    """The operation of CUDA meshes, which torch's C++ code calls on the group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(24.0).view(4, 6)
    made = torch.ops._dtensor.shard_dim_alltoall(whole.chunk(size, 0)[rank], 0, 1, dist.group.WORLD.group_name)
    same(made + 0, whole.chunk(size, 1)[rank].contiguous())
