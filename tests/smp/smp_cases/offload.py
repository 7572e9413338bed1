"""Activation offloading under FSDP1, FSDP2 and hybrid sharding: the same bits as without, and the same schedule."""

import functools

import pytest
import smddp.sagemaker as tsm
import torch
from ranks.errors import refused
from smddp.sagemaker import offload
from smp_cases.models import batch, loss_of, part_of, tiny
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

LAYERS = 4
STEPS = 2


def fsdp1(model, **options):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def fsdp2(model, **options):
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def checkpointed(model, reentrant):
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)

    def is_layer(module):
        return isinstance(module, LlamaDecoderLayer)

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_layer)
    return model


def train(shard, reentrant, offloaded, inside=False, clip=None, accumulate=1):
    """Losses, gradient norms and final shards of this rank.

    ``inside``: checkpointing below FSDP rather than above. ``accumulate``: micro-batches per step; FSDP1 wants each
    one's backward before the next forward, under FSDP2 all the forwards come first.
    """
    model = tiny("llama", num_hidden_layers=LAYERS)
    if inside:
        model = shard(checkpointed(model, reentrant))
    else:
        model = checkpointed(shard(model), reentrant)
    if offloaded:
        model = offload_wrapper(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = part_of(batch(step), tsm.state.dp_rank, tsm.state.dp_size).repeat(accumulate, 1).chunk(accumulate)
        losses = []
        for part in parts:
            losses.append(loss_of(model, part))
            if shard is not fsdp2:
                losses[-1].backward()
        if shard is fsdp2:
            for loss in losses:
                loss.backward()
        if clip is not None:
            found.append(clip(model))
        optimizer.step()
        found += [loss.detach() for loss in losses]
    shards = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    return model, found + shards


def same_with_offloading(config, **how):
    tsm.init(config)
    try:
        _, wanted = train(offloaded=False, **how)
        offload.reset()
        model, found = train(offloaded=True, **how)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b), (a, b)
        now = offload.statistics()
        passes = STEPS * how.get("accumulate", 1)
        assert now.stalls == passes, now
        assert now.max_resident_groups == config.get("activation_loading_horizon", 2) + 1, now
        assert (now.bytes_on_host, now.bytes_resident, now.stores_under_way) == (0, 0, 0), now
        # The layers' inputs are offloaded: (samples, 12 tokens, 32 features) of 4 bytes, or 2 under bfloat16.
        samples = len(part_of(batch(0), tsm.state.dp_rank, tsm.state.dp_size))
        width = 2 if how["shard"] is bfloat16 else 4
        assert now.bytes_offloaded == passes * LAYERS * samples * 12 * 32 * width, now
        return model
    finally:
        tsm.state.reset()


def bfloat16(model):
    return fsdp1(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def case_fsdp1_hybrid():
    model = same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp1, reentrant=False)
    inner = model._checkpoint_wrapped_module
    assert isinstance(inner, FSDP)
    assert model.process_group is inner.process_group, "scripts ask the wrapper for FSDP's group"


def case_fsdp1_hybrid_reentrant():
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp1, reentrant=True)


def case_fsdp1_original_parameters():
    same_with_offloading({}, shard=functools.partial(fsdp1, use_orig_params=True), reentrant=False)


def case_fsdp1_parameters_kept_gathered():
    kept = functools.partial(fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    same_with_offloading({}, shard=kept, reentrant=False)


def case_fsdp1_mixed_precision():
    same_with_offloading({}, shard=bfloat16, reentrant=False)


def case_fsdp2_hybrid():
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp2, reentrant=False)


def case_fsdp2_hybrid_reentrant():
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp2, reentrant=True)


def case_checkpointing_below_fsdp():
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp1, reentrant=False, inside=True)
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp2, reentrant=False, inside=True)


def case_horizon_of_one_and_of_all():
    for horizon in (1, LAYERS - 1):
        config = {"hybrid_shard_degree": 4, "activation_loading_horizon": horizon}
        same_with_offloading(config, shard=fsdp1, reentrant=False)


def case_accumulation():
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp1, reentrant=False, accumulate=2)
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp2, reentrant=False, accumulate=2)


def case_gradient_clipping():
    def by_fsdp(model):
        return model.clip_grad_norm_(0.1)

    def by_torch(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()

    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp1, reentrant=False, clip=by_fsdp)
    same_with_offloading({"hybrid_shard_degree": 2}, shard=fsdp2, reentrant=False, clip=by_torch)


def case_sharded_tensors_between_layers():
    """A layer's input may be a DTensor (sequence parallelism): its local part moves, the DTensor comes back."""
    tsm.init({})
    try:
        mesh = init_device_mesh("cpu", (4,))
        seen = []

        class Layer(torch.nn.Module):
            def forward(self, x):
                seen.append(x)
                return x * x

        def run(wrap):
            seen.clear()
            torch.manual_seed(0)
            sharded = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]).requires_grad_()
            layers = wrap(torch.nn.Sequential(*(checkpoint_wrapper(Layer()) for _ in range(2)))).train()
            loss = layers(sharded).square().sum().full_tensor()
            loss.backward()
            return loss.detach(), sharded.grad.to_local()

        wanted = run(lambda model: model)
        offload.reset()
        found = run(offload_wrapper)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert len(seen) == 4, "two layers, each run and run again"
        assert all(type(x) is DTensor and x.placements == (Shard(0),) for x in seen), seen
        now = offload.statistics()
        assert (now.tensors_offloaded, now.bytes_offloaded, now.bytes_on_host) == (2, 2 * 16 * 64 * 4, 0), now

        layer = offload_wrapper(torch.nn.Sequential(checkpoint_wrapper(Layer()))).train()
        x = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]).requires_grad_() * 1
        loss = layer(x).square().sum().full_tensor()
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        tsm.state.reset()


def case_disabled_offloading_keeps_torchs_wrapper():
    """The key off, init undone or not done yet: OffloadWrapper is torch's."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper

    own = OffloadWrapper.forward
    tsm.init({"sm_activation_offloading": False})
    assert OffloadWrapper.forward is own
    tsm.state.reset()
    tsm.init({})
    assert "activation_offloading" in [patch.name for patch in tsm.patches()]
    assert OffloadWrapper.forward is not own
    tsm.state.reset()
    assert OffloadWrapper.forward is own


def case_unwrapped_layers_are_reported_before_any_change():
    tsm.init({"hybrid_shard_degree": 2})
    try:
        model = offload_wrapper(fsdp1(tiny("llama")))
        with refused("apply_activation_checkpointing"):
            loss_of(model, batch(0))
    finally:
        tsm.state.reset()
