"""torch.compile over distributed models; "aot_eager" traces all of it and generates no code."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from training import assert_same, make_model, one_process, sgd, train

from cases.fsdp2 import shard


def case_collectives_in_one_graph():
    def exchange(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        parts = functional.all_gather_tensor(x + total, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(parts, "sum", 0, dist.group.WORLD)

    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.full((8,), float(rank))
    compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
    total = world * (world - 1) / 2
    wanted = torch.full((8,), world * (rank + total))
    # Element r*8+i of the gathered tensor is rank r's; reduce_scatter gives each its own back, world times.
    torch.testing.assert_close(compiled(x), wanted)


def case_ddp():
    model = DDP(make_model())
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(train(compiled, sgd(model.parameters())), one_process())


def case_fsdp2():
    model = shard(make_model(), init_device_mesh("cpu", (4,)))
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(train(compiled, sgd(model.parameters())), one_process())


def case_tensor_parallel():
    mesh = init_device_mesh("cpu", (4,))
    model = make_model()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(model, backend="aot_eager")
    assert_same(train(compiled, sgd(model.parameters()), part=(0, 1)), one_process())
