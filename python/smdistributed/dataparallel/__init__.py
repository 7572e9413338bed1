"""The module names under which scripts know this library. All of it is smddp and torch."""

from typing import Any

from smddp import _historic

_historic.warn_once()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        import smddp

        return smddp.__version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
