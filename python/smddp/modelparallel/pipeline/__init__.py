"""Execution of a step: schedule, microbatches and messages between stages."""

__all__: list[str] = []
