"""The modules that scripts written for SMDDP 1.x import, over the same group."""

import torch
from training import STEPS, assert_same, batch, loss_of, make_model, mean_over_ranks, one_process, sgd, slice_of


def case_import_registers_the_backend():
    import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401

    assert torch.distributed.is_backend_available("smddp")


def case_old_script_trains():
    import smdistributed.dataparallel.torch.distributed as dist
    from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
    from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as Same

    assert Same is DistributedDataParallel
    assert dist.is_available() and dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (
        torch.distributed.get_rank(),
        torch.distributed.get_world_size(),
    )
    assert dist.get_local_rank() == dist.get_rank()

    model = DistributedDataParallel(make_model(), broadcast_buffers=False)
    opt = sgd(model.parameters())
    got = []
    for step in range(STEPS):
        x, y = (slice_of(t) for t in batch(step))
        loss = loss_of(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        got.append(mean_over_ranks(loss))
    assert_same(got, one_process())


def case_old_collectives():
    import smdistributed.dataparallel.torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    value = torch.full((3,), float(rank))
    dist.all_reduce(value)
    assert value[0].item() == world * (world - 1) / 2
    value = torch.full((3,), float(rank))
    work = dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    assert value[0].item() == world - 1
    parts = [torch.empty(2) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part[0].item() for part in parts] == list(range(world))
    dist.broadcast(value, 1)
    out = torch.empty(world)
    dist.all_to_all_single(out, torch.arange(world, dtype=torch.float32) + 10 * rank)
    assert out.tolist() == [10 * r + rank for r in range(world)]
    dist.barrier()
