"""Execution of a step: schedule, microbatches and messages between stages."""
