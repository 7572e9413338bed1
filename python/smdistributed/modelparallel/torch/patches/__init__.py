"""Package of `checkpoint`, for scripts."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
