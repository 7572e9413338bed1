"""Replicas and sharded data parallelism."""

__all__: list[str] = []
