"""Actions of a rank in the fault matrix: calls of all forms, and creation and destruction of groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend import calls
from backend.calls import Started, of

#: Timeout of each call and of the creation of each group. A cell may override it.
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
    # Without an explicit timeout the group would have torch's 30 minutes, not the first group's.
    made = dist.new_group(list(range(group.size())), timeout=LIMIT)
    return calls.all_reduce(count).begin(made, True)


def _split_group(group: Any, count: int) -> Started:
    """Splits the ranks into halves; two ranks remain together."""
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
#: Faults outside of calls: other ranks create or destroy the default group, so no call is named.
EDGES = ("init", "destroy")
CALLS = (*_forms(2, 1), *_OWN, *EDGES)

# Name in messages if it differs from the beginning of the action's name. A new group may still measure its network.
_WORDS = {
    "ring": ("send", "recv"),
    "new_group": ("all_reduce", "new_group"),
    "init": ("init_process_group", "all_reduce", "send", "recv"),
}
_WORDS["split_group"] = (*_WORDS["new_group"], "split_group")


def words(name: str) -> tuple[str, ...]:
    """Returns the operations that a survivor may have been in. A barrier follows every call."""
    return (*_WORDS.get(name, (name.partition("-")[0],)), "barrier")


def begin(name: str, count: int) -> tuple[list, list, list]:
    """Starts the call on the default group. Returns the works, their outputs and the expected values."""
    group = dist.group.WORLD
    if name == "ring":
        return _ring(group, count)
    call = _forms(group.size(), count).get(name)
    work, found, right = call.begin(group, True) if call else _OWN[name](group, count)
    return [work] if work is not None else [], found, right
