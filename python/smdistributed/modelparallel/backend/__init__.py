"""What the training toolkit looks for: `exceptions`."""
