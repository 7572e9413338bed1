"""Accelerate with FSDP2 and tensor parallelism, with both degrees configured as in docs/guides/smp."""

import os

import sagemaker_environment  # noqa: F401

# isort: split
import torch.distributed as dist
import torch.sagemaker as tsm
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.parallelism_config import ParallelismConfig
from script import Rows, check, make_model, plain_sgd
from torch.utils.data import DataLoader
from training import ROWS, loss_of

TENSOR = 2
SHARD = int(os.environ["WORLD_SIZE"]) // TENSOR


def main() -> None:
    dist.init_process_group("smddp")
    tsm.init({"hybrid_shard_degree": SHARD, "tensor_parallel_degree": TENSOR})
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    model = tsm.transform(make_model(), config={"tp_plan": plan})

    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(dp_shard_size=SHARD, tp_size=TENSOR),
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        ),
    )
    model, opt, loader = accelerator.prepare(
        model, plain_sgd(model.parameters()), DataLoader(Rows(), batch_size=ROWS // SHARD, shuffle=False)
    )
    losses = []
    for rows in loader:
        loss = loss_of(model(rows["x"]), rows["labels"])
        opt.zero_grad()
        accelerator.backward(loss)
        opt.step()
        losses.append(loss.detach().clone())
    check(losses, "smddp")


if __name__ == "__main__":
    main()
