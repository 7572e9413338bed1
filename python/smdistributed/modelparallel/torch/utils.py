"""Helpers that published scripts import."""

from smddp.modelparallel.utils import get_distribution_axis, rmsg

__all__ = ["get_distribution_axis", "rmsg"]
