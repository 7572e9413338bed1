"""DeepSpeed ZeRO-3 on CPU, parameters partitioned from construction on (zero.Init)."""

import os

# Both before deepspeed is imported.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DS_BUILD_OPS"] = "0"

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__
from script import BACKEND, PER_RANK, Rows, check, make_model, plain_sgd
from torch.utils.data import DataLoader, DistributedSampler
from training import loss_of

# DeepSpeed's shared-memory all_reduce would take minutes to compile and bypass smddp.
__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": PER_RANK,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1000,
        "reduce_bucket_size": 1000,
        "overlap_comm": False,
    },
    "steps_per_print": 1000,
}


def main() -> None:
    deepspeed.init_distributed(dist_backend=BACKEND)
    wanted = make_model().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = make_model()
    # zero.Init partitions what rank 0 constructs; set it to the job's weights.
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if torch.distributed.get_rank() == 0:
                parameter.data.copy_(wanted[name])
    engine, *_ = deepspeed.initialize(model=model, optimizer=plain_sgd(model.parameters()), config=CONFIG)
    rows = Rows()
    losses = []
    for step in DataLoader(rows, batch_size=PER_RANK, sampler=DistributedSampler(rows, shuffle=False)):
        loss = loss_of(engine(step["x"]), step["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    check(losses)


if __name__ == "__main__":
    main()
