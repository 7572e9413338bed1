"""What is said with SMDDP_DEBUG=INFO, and warnings."""

from __future__ import annotations

import contextlib
import os
import sys

from smddp._native import core


def wanted() -> bool:
    """Whether anybody wants to be told."""
    return _settings().get("SMDDP_DEBUG", "").upper() in ("INFO", "TRACE")


def warn(line: str) -> None:
    """The same of what is wrong, which SMDDP_DEBUG=VERSION or NONE keeps quiet. Never raises."""
    if _settings().get("SMDDP_DEBUG", "").upper() not in ("VERSION", "NONE", "0"):
        with contextlib.suppress(OSError):
            tell(line)


def tell(line: str) -> None:
    """One line to SMDDP_DEBUG_FILE, or to stderr."""
    line = f"smddp: {line}\n"
    file = _settings().get("SMDDP_DEBUG_FILE")
    if file:
        with open(file.replace("%h", os.uname().nodename).replace("%p", str(os.getpid())), "a") as log:
            log.write(line)
    else:
        sys.stderr.write(line)


def _settings() -> dict[str, str]:
    return {name: value for name, value, *_ in core().settings()}
