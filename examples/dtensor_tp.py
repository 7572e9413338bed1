"""Tensor parallelism with DTensor: attention heads and hidden units split over the ranks, activations
all-reduced twice per block in each direction. The number of heads must be a multiple of the ranks.

  torchrun --nproc-per-node 4 examples/dtensor_tp.py --backend smddp

The twin model for the communication share is one rank's part of the model: the same local matrix
products without the all-reduces. It does not learn.
"""

import common
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "feed_forward.up": ColwiseParallel(),
    "feed_forward.down": RowwiseParallel(),
}


def main():
    o = common.arguments(__doc__)
    common.start(o)
    world = dist.get_world_size()
    if o.heads % world:
        raise SystemExit(f"--heads {o.heads} does not divide over {world} ranks")
    model = common.make(o)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        parallelize_module(block, mesh, PLAN)
    common.train(o, "DTensor tensor parallelism", model, common.make(o, share=world), same_data=True)


if __name__ == "__main__":
    main()
