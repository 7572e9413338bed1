"""FSDP1: the wrapper class, one flat parameter per block.

torchrun --nproc-per-node 4 examples/fsdp1.py --backend smddp
torchrun --nproc-per-node 4 examples/fsdp1.py --strategy SHARD_GRAD_OP
"""

import functools

import common
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def main():
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    o = common.arguments(__doc__, lambda p: p.add_argument("--strategy", default="FULL_SHARD", choices=strategies))
    common.start(o)
    twin = common.make(o)
    model = common.make(o)
    model.load_state_dict(twin.state_dict())
    model = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[o.strategy],
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={common.Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    common.train(o, f"FSDP1 {o.strategy}", model, twin)


if __name__ == "__main__":
    main()
