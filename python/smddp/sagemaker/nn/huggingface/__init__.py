"""Attention layers in the form that Hugging Face models call."""

__all__: list[str] = []
