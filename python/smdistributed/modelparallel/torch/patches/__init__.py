"""Where scripts find `checkpoint`."""

from smdistributed.modelparallel.torch.patches import checkpoint

__all__ = ["checkpoint"]
