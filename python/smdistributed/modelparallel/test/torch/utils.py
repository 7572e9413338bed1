"""Helpers that the BERT example imports and never calls."""

from smddp.modelparallel.utils import dump_model, verify

__all__ = ["dump_model", "verify"]
