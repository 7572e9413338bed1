"""Lines of the log: what is said with SMDDP_DEBUG=INFO, and warnings. The core writes them, as it does its own."""

from __future__ import annotations

from smddp._native import core


def wanted() -> bool:
    """Whether anybody wants to be told."""
    return core().tells()


def warn(line: str) -> None:
    """What is wrong, which SMDDP_DEBUG=VERSION or NONE keeps quiet. Never raises."""
    core().say(True, line)


def tell(line: str) -> None:
    """One line at SMDDP_DEBUG=INFO. Never raises."""
    core().say(False, line)
