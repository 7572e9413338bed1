"""The errors that a job may report as its first cause: those of `smdistributed.dataparallel.exceptions`."""

from smdistributed.dataparallel.exceptions import CollectiveTimeoutError, MismatchError, TopologyError

__all__ = ["CollectiveTimeoutError", "MismatchError", "TopologyError"]
