"""Older names for FSDP models."""
