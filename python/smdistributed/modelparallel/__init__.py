"""The module names under which scripts know pipelines: all of it smddp and torch."""

from smddp import _historic

# The last release that scripts were written for; transformers asks.
__version__ = "1.15.0"

_historic.warn_once()
