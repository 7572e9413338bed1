"""Results of functional collectives as arguments of other calls."""

from __future__ import annotations

from typing import Any


def waited_for(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments with plain tensors in the place of functional collectives' results, which are waited for.

    None: there are no such results among them. torch's own backends are called through its dispatcher, which does this;
    calls of a group that is written in Python do not pass there. Asked only about tensors that turned out to have no
    memory of their own, as such results have none.
    """
    # Imported here: a large module, which whoever has such a tensor has imported.
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
