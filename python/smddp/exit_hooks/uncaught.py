"""Report of an uncaught exception to the ranks that still wait for this process."""

from __future__ import annotations

import os
import sys
import traceback

from smddp._native import core
from smddp.exit_hooks import first_cause
from smddp.observability import stacks


def report_uncaught() -> None:
    """Reports the uncaught exception to the ranks of this node, unless it is an error of a group."""
    error = getattr(sys, "last_value", None)
    # The core reports its own errors.
    if error is not None and not first_cause.follows(error, core().Error):
        # On one line, even if its __str__ raises.
        text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
        core().set_last_error(f"the program of pid {os.getpid()}: {text}{_place(error)}")


def _place(error: BaseException) -> str:
    """Returns the program's frame of an error, unless SMDDP_STACKS disables it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not core().are_stacks_enabled():
        return ""
    theirs = [frame for frame in frames if not frame.filename.startswith(tuple(stacks.own_folders()))]
    frame = (theirs or frames)[-1]
    return f", at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
