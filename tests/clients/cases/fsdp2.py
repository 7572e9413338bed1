"""fully_shard (FSDP2): one dimension, HSDP, with tensor parallelism."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Model, assert_same, make_model, mean_over_ranks, one_process, sgd, train


def shard(model: Model, mesh: DeviceMesh, **options) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _train(mesh: DeviceMesh, **options) -> None:
    model = shard(make_model(), mesh, **options)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_one_dimension():
    _train(init_device_mesh("cpu", (4,)))


def case_parameters_are_not_resharded_after_forward():
    _train(init_device_mesh("cpu", (4,)), reshard_after_forward=False)


def case_hsdp():
    _train(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def case_clip_grad_norm():
    model = shard(make_model(), init_device_mesh("cpu", (4,)))

    def clip() -> None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert isinstance(norm, DTensor)

    assert_same(train(model, sgd(model.parameters()), clip=clip), one_process(clip=0.1))


def case_gradients_accumulate_without_sync():
    """Gradients of two half batches, reduced once, are those of the whole."""
    from training import STEPS, batch, loss_of, slice_of

    model = shard(make_model(), init_device_mesh("cpu", (4,)))
    opt = sgd(model.parameters())
    got = []
    for step in range(STEPS):
        x, y = (slice_of(t) for t in batch(step))
        opt.zero_grad()
        total = torch.zeros(())
        for index, (part, target) in enumerate(zip(x.chunk(2), y.chunk(2))):
            model.set_requires_gradient_sync(index == 1)
            loss = loss_of(model(part), target) / 2
            loss.backward()
            total += loss.detach()
        opt.step()
        got.append(mean_over_ranks(total))
    assert_same(got, one_process())


def case_bf16_parameters_agree_across_ranks():
    """With bf16 communication the loss is close to that of one process and equal on all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = shard(make_model(), init_device_mesh("cpu", (4,)), mp_policy=policy)
    # bf16 has 8 significant bits: this bound detects wrong results, not rounding.
    assert_same(train(model, sgd(model.parameters())), one_process(), tolerance=0.05)
    for parameter in model.parameters():
        full = parameter.full_tensor()
        first = full.clone()
        dist.broadcast(first, 0)
        assert torch.equal(full, first)


def case_with_tensor_parallel():
    """Two dimensions: FSDP2 over one, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = shard(model, mesh["dp"])
    losses = train(model, sgd(model.parameters()), part=(mesh["dp"].get_local_rank(), 2))
    assert_same(losses, one_process())
