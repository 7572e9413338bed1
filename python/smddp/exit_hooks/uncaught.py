"""The exception that ends a program, for the ranks that still wait for it: theirs is a consequence."""

from __future__ import annotations

import os
import sys
import traceback

from smddp._native import core
from smddp.exit_hooks import first_cause
from smddp.observability import stacks


def leave() -> None:
    """Tell those of this node that see this process go what nobody caught in it, if that was no error of a group."""
    error = getattr(sys, "last_value", None)
    # The core tells of its own.
    if error is not None and not first_cause.follows(error, core().Error):
        # In one line, and whatever its own __str__ does.
        told = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
        core().leave_error(f"the program of pid {os.getpid()}: {told}{_place(error)}")


def _place(error: BaseException) -> str:
    """Where in the program, as far as others may be told of that (SMDDP_STACKS)."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not core().stacks():
        return ""
    theirs = [frame for frame in frames if not frame.filename.startswith(tuple(stacks.own_folders()))]
    frame = (theirs or frames)[-1]
    return f", at {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
