"""Error feedback for gradients that are sent in a compressed format."""

__all__: list[str] = []
