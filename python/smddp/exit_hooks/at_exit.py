"""Exit hook: waits for callbacks of futures, then shuts down all groups.

Python runs exit hooks in the reverse order of their registration. This one is registered when smddp is first imported,
which `import torch` does, so that later hooks of the program may still use its groups.
"""

from __future__ import annotations

import atexit
import os
import sys

# Maximum seconds to wait for due or running callbacks of futures.
_CALLBACK_SECONDS = 30.0

# Process that has groups, and process in which the hook was registered.
_owner: int | None = None
_registered: int | None = None


def register() -> None:
    """Registers the hook. Loads nothing."""
    global _registered
    _registered = os.getpid()
    atexit.register(_leave)


def shut_down_at_exit() -> None:
    """Enables the hook for this process. Idempotent; a forked child without groups does nothing at exit."""
    global _owner
    _owner = os.getpid()
    if _registered != _owner and _hooks_were_dropped():
        register()


def _hooks_were_dropped() -> bool:
    """Returns whether this is a child of multiprocessing, which drops its parent's hooks from Python 3.13 on."""
    process = sys.modules.get("multiprocessing.process")
    return sys.version_info >= (3, 13) and process is not None and process.parent_process() is not None


def _leave() -> None:
    """Shuts down the groups, after the delay for a failed peer."""
    if _owner != os.getpid():
        return
    from smddp._native import core
    from smddp.exit_hooks import uncaught
    from smddp.exit_hooks.first_cause import delay_exit

    try:
        uncaught.report_uncaught()
    finally:
        delay_exit()
        core().shutdown(_CALLBACK_SECONDS)
