"""What a rank of the fault matrix does when another one fails: calls of all forms, and what makes and ends groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend import calls
from backend.calls import Started, of

#: Of each call, and of the making of each group. A cell may have another one.
LIMIT = timedelta(seconds=3)


def _forms(size: int, count: int) -> dict[str, calls.Call]:
    even, uneven = [count] * size, [count + 2 * rank for rank in range(size)]
    return {
        "all_reduce": calls.all_reduce(count),
        "all_reduce-shaped": calls.all_reduce(count, op="AVG", form="shaped"),
        "all_reduce-coalesced": calls.coalesced([count, 3]),
        "reduce": calls.reduce(count),
        "broadcast": calls.broadcast(count),
        "broadcast-strided": calls.broadcast(count, form="strided"),
        "all_gather": calls.all_gather(even, form="tensor"),
        "all_gather-list": calls.all_gather(even),
        "all_gather-uneven": calls.all_gather(uneven),
        "reduce_scatter": calls.reduce_scatter(even, form="tensor"),
        "reduce_scatter-uneven": calls.reduce_scatter(uneven),
        "all_to_all": calls.all_to_all(even, form="even"),
        "all_to_all-list": calls.all_to_all(uneven),
        "all_to_all-splits": calls.all_to_all(uneven, form="splits"),
        "gather": calls.gather(count),
        "scatter": calls.scatter(count),
        "barrier": calls.barrier(),
    }


def _ring(group: Any, count: int) -> tuple[list, list, list]:
    rank, size, found = group.rank(), group.size(), torch.empty(count)
    before = (rank - 1) % size
    works = [dist.isend(of(rank, count, found.dtype), (rank + 1) % size, group), dist.irecv(found, before, group)]
    return works, [found], [of(before, count, found.dtype)]


def _new_group(group: Any, count: int) -> Started:
    # Without a timeout of its own the group would have torch's half hour, whatever the first one has.
    made = dist.new_group(list(range(group.size())), timeout=LIMIT)
    return calls.all_reduce(count).begin(made, True)


def _split_group(group: Any, count: int) -> Started:
    """Into halves; two ranks stay together."""
    size = group.size()
    half = size // 2 if size > 3 else size
    parts = [part for part in (list(range(half)), list(range(half, size))) if part]
    if hasattr(dist, "split_group"):
        made = dist.split_group(split_ranks=parts, timeout=LIMIT)
    else:
        groups = [dist.new_group(part, timeout=LIMIT) for part in parts]
        made = groups[group.rank() // half]
    return calls.all_reduce(count).begin(made, True)


_OWN: dict[str, Callable[[Any, int], Any]] = {"ring": _ring, "new_group": _new_group, "split_group": _split_group}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MAKING = ("new_group", "split_group")
#: A rank that ends here is met by others that make or leave the group of all, so there is no call to name.
EDGES = ("init", "destroy")
CALLS = (*_forms(2, 1), *_OWN, *EDGES)

# What messages call it, where that is not the beginning of its name. A group may just have been made, or measures its
# network.
_WORDS = {
    "ring": ("send", "recv"),
    "new_group": ("all_reduce", "new_group"),
    "init": ("init_process_group", "all_reduce", "send", "recv"),
}
_WORDS["split_group"] = _WORDS["new_group"]


def words(name: str) -> tuple[str, ...]:
    """The operations that a survivor may have been in. Every call has a barrier after it."""
    return (*_WORDS.get(name, (name.partition("-")[0],)), "barrier")


def begin(name: str, count: int) -> tuple[list, list, list]:
    """Starts it on the group of all. Returns the works, what they fill, and what is right there."""
    group = dist.group.WORLD
    if name == "ring":
        return _ring(group, count)
    call = _forms(group.size(), count).get(name)
    work, found, right = call.begin(group, True) if call else _OWN[name](group, count)
    return [work] if work is not None else [], found, right
