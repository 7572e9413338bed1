"""FullyShardedDataParallel (FSDP1) with its sharding strategies."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from training import Block, assert_same, make_model, one_process, sgd, train

_POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def _wrap(strategy: ShardingStrategy, **options) -> FSDP:
    return FSDP(
        make_model(),
        sharding_strategy=strategy,
        auto_wrap_policy=_POLICY,
        device_id=torch.device("cpu"),
        **options,
    )


def _train(strategy: ShardingStrategy, **options) -> None:
    model = _wrap(strategy, **options)
    assert_same(train(model, sgd(model.parameters())), one_process())


def case_full_shard():
    _train(ShardingStrategy.FULL_SHARD)


def case_full_shard_with_original_parameters():
    _train(ShardingStrategy.FULL_SHARD, use_orig_params=True, backward_prefetch=BackwardPrefetch.BACKWARD_POST)


def case_shard_grad_op():
    _train(ShardingStrategy.SHARD_GRAD_OP)


def case_hybrid_shard():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _train(ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def case_hybrid_shard_with_groups():
    """The groups given by hand, as scripts without a mesh do."""
    rank = dist.get_rank()
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    _train(ShardingStrategy.HYBRID_SHARD, process_group=(shard, replicate))


def case_clip_grad_norm():
    model = _wrap(ShardingStrategy.FULL_SHARD)
    losses = train(model, sgd(model.parameters()), clip=lambda: model.clip_grad_norm_(0.1))
    assert_same(losses, one_process(clip=0.1))


def case_full_state_dict_and_back():
    """Weights gathered on rank 0 after training are those of one process that trained the same."""
    model = _wrap(ShardingStrategy.FULL_SHARD)
    train(model, sgd(model.parameters()))
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    assert bool(state) == (dist.get_rank() == 0)
    optimizer = FSDP.optim_state_dict(model, sgd(model.parameters()))
    assert "param_groups" in optimizer
    if state:
        plain = make_model()
        wanted = one_process(make=lambda: plain)
        assert len(wanted) > 0
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
