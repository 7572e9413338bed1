"""The end of the process: callbacks of futures end, then all groups are left in good order.

Python runs exit hooks in the reverse order of their registration. This one is registered when smddp is first imported,
which `import torch` does, so that later hooks of the program may still use its groups.
"""

from __future__ import annotations

import atexit
import os
import sys

# Seconds for which the exit waits for callbacks of futures that are due or run.
_CALLBACK_SECONDS = 30.0

# The process that has groups, and the one in which the hook was registered.
_owner: int | None = None
_registered: int | None = None


def register() -> None:
    """Registers the hook. Loads nothing."""
    global _registered
    _registered = os.getpid()
    atexit.register(_leave)


def shut_down_at_exit() -> None:
    """Has the hook leave this process's groups. Idempotent; a forked child without groups of its own leaves none."""
    global _owner
    _owner = os.getpid()
    if _registered != _owner and _hooks_were_dropped():
        register()


def _hooks_were_dropped() -> bool:
    """Returns whether this is a child of multiprocessing, which drops its parent's hooks from Python 3.13 on."""
    process = sys.modules.get("multiprocessing.process")
    return sys.version_info >= (3, 13) and process is not None and process.parent_process() is not None


def _leave() -> None:
    """Leaves the groups, not before a peer whose end this process follows."""
    if _owner != os.getpid():
        return
    from smddp._native import core
    from smddp.exit_hooks import uncaught
    from smddp.exit_hooks.first_cause import give_way

    try:
        uncaught.leave()
    finally:
        give_way()
        core().shutdown(_CALLBACK_SECONDS)
