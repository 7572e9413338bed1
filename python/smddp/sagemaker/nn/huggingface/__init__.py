"""Attention layers in the form that Hugging Face models call."""
