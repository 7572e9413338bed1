"""Package of the helpers that the BERT example imports."""
