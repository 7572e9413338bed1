"""Results of functional collectives as arguments of other calls."""

from __future__ import annotations

from typing import Any

from smddp.torch.compat import async_collective_tensor


def waited_for(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Waits for results of functional collectives among the arguments, and returns them as plain tensors.

    Returns None without such results. torch's dispatcher does this for C++ groups; calls of a Python group bypass it.
    Called only for tensors without memory, which such results are.
    """
    kind = async_collective_tensor()
    found = False

    def plain(item: Any) -> Any:
        nonlocal found
        if isinstance(item, kind):
            found = True
            return item.trigger_wait()
        if isinstance(item, (list, tuple)):
            return [plain(each) for each in item]
        return item

    made = tuple(plain(argument) for argument in arguments)
    return made if found else None
