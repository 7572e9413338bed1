"""FSDP2: parameters, gradients and optimizer state sharded over all ranks (all_gather and reduce_scatter).

torchrun --nproc-per-node 4 examples/fsdp2.py --backend smddp
With --error-feedback, what SMDDP_WIRE_FORMAT rounds away of gradients is added to the next step's.
"""

import common
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def options(parser):
    parser.add_argument("--error-feedback", action="store_true", help="smddp.experimental.error_feedback_fsdp")


def main():
    o = common.arguments(__doc__, options)
    common.start(o)
    twin = common.make(o)
    model = common.make(o)
    model.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if o.error_feedback:
        from smddp.experimental import error_feedback_fsdp

        error_feedback_fsdp(model)
    common.train(o, "FSDP2", model, twin)


if __name__ == "__main__":
    main()
