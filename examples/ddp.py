"""DDP: a whole copy on every rank, gradients all-reduced in buckets behind the backward pass.

torchrun --nproc-per-node 4 examples/ddp.py --backend smddp
"""

import common
from torch.nn.parallel import DistributedDataParallel


def main():
    o = common.arguments(__doc__)
    common.start(o)
    twin = common.make(o)
    model = common.make(o)
    model.load_state_dict(twin.state_dict())
    common.train(o, "DDP", DistributedDataParallel(model), twin)


if __name__ == "__main__":
    main()
