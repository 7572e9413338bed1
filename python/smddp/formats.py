"""`smddp.exact`: calls that SMDDP_WIRE_FORMAT does not concern."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smddp._native import core


@contextmanager
def exact() -> Iterator[None]:
    """Context in which this thread's collectives leave elements unchanged between nodes, whatever the settings say.

    Use it for results that are kept (a checkpoint of whole parameters, statistics) where SMDDP_WIRE_FORMAT is set. All
    ranks of a call must do the same, or it is a MismatchError. Also a decorator. No effect without the setting.

    Example:
        >>> with smddp.exact():
        ...     state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    """
    before = core().set_exact(True)
    try:
        yield
    finally:
        core().set_exact(before)


def is_exact() -> bool:
    """Returns True if this thread is within `exact`."""
    native = core()
    before: bool = native.set_exact(True)
    native.set_exact(before)
    return before
