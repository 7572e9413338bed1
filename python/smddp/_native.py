"""The one place that loads the native core.

A core that cannot be loaded is an ImportError with the reason, never a ModuleNotFoundError: scripts catch
the latter to fall back to another backend in silence, which is right only where smddp is not installed.
"""

from __future__ import annotations

import atexit
import os
from types import ModuleType

_core: ModuleType | None = None


def core() -> ModuleType:
    """The module smddp._core. Loading it makes no thread, lock or descriptor.

    Raises ImportError where it is missing or does not fit this machine.
    """
    global _core
    if _core is None:
        try:
            import smddp._core as loaded
        except ImportError as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            _core = loaded
            return loaded
        raise ImportError(
            f"smddp is installed, but its native core smddp._core cannot be loaded ({reason}). "
            "Reinstall the wheel for this machine and Python, or build it with `maturin develop --release`.",
            name="smddp._core",
        )
    return _core


_exit_hook_pid: int | None = None


def shut_down_at_exit() -> None:
    """Have this process leave its groups in good order when the interpreter exits, and not before a peer whose end it
    follows. Idempotent.

    A child that was forked later inherits the hook but not the groups, so the hook looks at the pid.
    """
    global _exit_hook_pid
    if _exit_hook_pid == os.getpid():
        return
    _exit_hook_pid = owner = os.getpid()
    native = core()
    # Here and not above, because they ask this module for the core.
    from smddp import last_error
    from smddp.first_cause import give_way

    def leave() -> None:
        if os.getpid() == owner:
            try:
                last_error.leave()
            finally:
                give_way()
                native.shutdown()

    atexit.register(leave)
