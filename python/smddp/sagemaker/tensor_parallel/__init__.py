"""Tensor parallelism: plans, sharded layers and DTensor parameters of transformers models."""

__all__: list[str] = []
