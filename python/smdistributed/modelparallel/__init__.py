"""The module names under which scripts know pipelines: all of it smddp and torch."""

# The last release that scripts were written for; transformers asks.
__version__ = "1.15.0"
