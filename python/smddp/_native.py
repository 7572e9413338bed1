"""The one place that loads the native core.

A core that cannot be loaded is an ImportError with the reason, never a ModuleNotFoundError: scripts catch
the latter to fall back to another backend in silence, which is right only where smddp is not installed.
"""

from __future__ import annotations

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
