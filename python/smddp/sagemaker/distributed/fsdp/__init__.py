"""Older names for FSDP models."""

__all__: list[str] = []
