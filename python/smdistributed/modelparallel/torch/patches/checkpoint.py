"""Checkpointing of activations."""

from smddp.modelparallel.activation import checkpoint, checkpoint_sequential

__all__ = ["checkpoint", "checkpoint_sequential"]
