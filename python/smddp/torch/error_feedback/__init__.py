"""Error feedback for gradients that travel in a compressed format."""
