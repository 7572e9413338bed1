"""Attention modules over torch's scaled_dot_product_attention."""

__all__: list[str] = []
