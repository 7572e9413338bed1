"""Replicas and sharded data parallelism."""
