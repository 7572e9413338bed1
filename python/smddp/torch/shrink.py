"""`torch.distributed.shrink_group`: a new group of some ranks of another one, without the help of the rest.

torch asks a backend for the new group's backend, destroys the old group, and makes a group of its own class around what
it got. That one would not be what a smddp group is: it has no direct door, and can be neither reconfigured nor split.
Besides, torch takes the excluded ranks, which count in the group, for ranks of the world; and it counts the group, or
begins to count anew, so that a `new_group` afterwards has another name than on ranks that had no part in this, or one
that was used before. So our group takes its place, with the ranks that it has; what other backends get stays as torch
makes it.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as dist_c10d

from smddp.exit_hooks import first_cause
from smddp.torch.device_map import Request, SmddpDevice

#: The call's name in errors.
SHRINK = "shrink_group"
_DEFAULT = getattr(dist_c10d, "SHRINK_DEFAULT", 0)
_ABORT = getattr(dist_c10d, "SHRINK_ABORT", 1)
# What torch makes the new group with. One without such a function, or that calls no backend in Python, refuses.
_MAKES = "_create_shrunk_process_group"


class Shrinkable:
    """The part of a group that makes smaller ones of it."""

    _comm: Any
    _rank: int
    _size: int
    _timeout: timedelta
    _all_ranks: Sequence[int]
    _group_store: Any
    _others: dict[str, Any]
    _request: Request
    # How often a group without these ranks was tried: each try meets at a place of its own.
    _tries: Counter[tuple[int, ...]]
    # How many groups torch had counted when this one was made.
    _groups_before: int
    _leave: Callable[[], None]
    abort: Callable[[], None]

    @property
    def supports_shrinking(self) -> bool:
        """Not where devices have different backends: torch would shrink one of them and drop the others."""
        return not self._others and _takes_our_group()

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = _DEFAULT, opts_override: Any = None) -> Any:
        """The group of all ranks of this one but those excluded, in their order. All of them call it, and nobody else.

        shrink_flags: SHRINK_ABORT ends what is under way here first, on all ranks; SHRINK_DEFAULT, when the new group
        is made. This group is left then, without waiting for anybody: who is still in it is told that this rank left.
        Raises ValueError for ranks that make no smaller group, CollectiveTimeoutError naming those who did not come
        within the group's timeout; after an error this group is as it was, aborted or not.
        """
        if self._others:
            raise RuntimeError(
                f"shrink: the devices of this group have different backends ({self._request.backends}); make a new "
                "group of the ranks that stay with new_group(ranks, use_local_synchronization=True)"
            )
        without = self._excluded(ranks_to_exclude)
        if shrink_flags not in (_DEFAULT, _ABORT):
            raise ValueError(f"shrink: the flags are SHRINK_DEFAULT ({_DEFAULT}) or SHRINK_ABORT ({_ABORT})")
        if opts_override is not None:
            warnings.warn(f"smddp has no group options; {type(opts_override).__name__} is ignored", stacklevel=2)
        if shrink_flags == _ABORT:
            self.abort()
        self._tries[without] += 1
        told = "_".join(map(str, without))
        stay = [rank for rank in range(self._size) if rank not in without]
        store = PrefixStore(f"shrunk/{told}/{self._tries[without]}", self._group_store)
        # As of reconfigure: the ranks of the group of all ranks are the world's from now on.
        whole = self is dist_c10d.GroupMember.WORLD
        group = type(self)(  # type: ignore[call-arg]
            store=store,
            group_store=store,
            rank=stay.index(self._rank),
            size=len(stay),
            timeout=self._timeout,
            name=f"{self._comm.name}:without:{told}",
            global_ranks=[] if whole else [self._all_ranks[rank] for rank in stay],
            request=Request(dict(self._request.backends), None, self._request.device_id),
            made_by=SHRINK,
        )
        group._groups_before = dist_c10d._world.group_count
        self._leave()
        first_cause.clear()
        return group

    def _excluded(self, ranks: Sequence[int]) -> tuple[int, ...]:
        without = tuple(sorted(set(ranks)))
        if not without or len(without) != len(ranks) or not all(0 <= rank < self._size for rank in without):
            raise ValueError(f"shrink: {list(ranks)} are not different ranks of a group of {self._size}")
        if self._rank in without:
            raise ValueError(
                f"shrink: rank {self._rank} is among the excluded {list(ranks)}; only those that stay call it"
            )
        return without


def _takes_our_group() -> bool:
    """Whether this torch's `shrink_group` returns the group that we made. Sees to it; idempotent."""
    create = getattr(dist_c10d, _MAKES, None)
    if create is not None and not hasattr(create, "__wrapped__"):
        setattr(dist_c10d, _MAKES, _with_our_group(create))
    return create is not None


def _with_our_group(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_shrunk(new_backend: Any, remaining_ranks: list[int], metadata: Any, is_default_group: bool) -> Any:
        if not isinstance(new_backend, SmddpDevice):
            return create(new_backend, remaining_ranks, metadata, is_default_group)
        group = new_backend.served_group()
        # torch goes on with these very objects.
        remaining_ranks[:] = group._all_ranks
        metadata["new_group_name"] = group.communicator.name
        dist_c10d._world.group_count = group._groups_before
        group._set_group_name(group.communicator.name)
        group._set_group_desc("default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk")
        return group

    return create_shrunk
