"""Translation of state dicts, one module for each of transformers' families that the original knew."""
