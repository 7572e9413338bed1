"""Package of `exceptions`, which the training toolkit imports."""
