"""Older home of `smp.state`."""

from smddp.modelparallel.state import state

__all__ = ["state"]
