"""torch's DistributedDataParallel: the reduction is the process group's business."""

from torch.nn.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
