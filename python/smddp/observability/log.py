"""Log lines and warnings of the Python layers, written by the core in its own format."""

from __future__ import annotations

from smddp._native import core


def is_enabled() -> bool:
    """Returns True if SMDDP_DEBUG or `smddp.log_to` enables INFO lines."""
    return core().is_info_enabled()


def warning(line: str) -> None:
    """Logs a warning, unless SMDDP_DEBUG is VERSION or NONE. Never raises."""
    core().log_line(True, line)


def info(line: str) -> None:
    """Logs a line at SMDDP_DEBUG=INFO. Never raises."""
    core().log_line(False, line)
