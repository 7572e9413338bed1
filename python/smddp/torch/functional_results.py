"""Results of functional collectives as arguments of other calls."""

from __future__ import annotations

from typing import Any


def waited_for(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Waits for results of functional collectives among the arguments, and returns them as plain tensors.

    Returns None without such results. torch's dispatcher does this for C++ groups; calls of a Python group bypass it.
    Called only for tensors without memory, which such results are.
    """
    # Imported here: a large module, already imported if such a tensor exists.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    found = False

    def plain(item: Any) -> Any:
        nonlocal found
        if isinstance(item, AsyncCollectiveTensor):
            found = True
            return item.trigger_wait()
        if isinstance(item, (list, tuple)):
            return [plain(each) for each in item]
        return item

    made = tuple(plain(argument) for argument in arguments)
    return made if found else None
