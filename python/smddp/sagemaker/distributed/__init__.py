"""Checkpoints of sharded models."""

__all__: list[str] = []
