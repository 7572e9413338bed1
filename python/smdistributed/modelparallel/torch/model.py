"""The wrapped model, where transformers looks for its class."""

from smddp.modelparallel.model import DistributedModel

__all__ = ["DistributedModel"]
