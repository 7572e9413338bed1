"""`torch.distributed.shrink_group`: creates a group of the remaining ranks without the excluded ranks.

torch requests the new group's backend, destroys the old group and wraps the backend in its own group class. That class
has no direct dispatch and supports neither reconfiguration nor split. torch also treats the excluded group ranks as
global ranks. It changes its group counter, so a later `new_group` gets a name that differs between ranks or was used
before. This module therefore substitutes the smddp group with its ranks; other backends' groups are unchanged.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed import distributed_c10d as dist_c10d

from smddp.exit_hooks import first_cause
from smddp.torch.device_map import Request, SmddpDevice
from smddp.torch.reconfigure import is_default_group

#: Operation name in errors.
SHRINK = "shrink_group"
_DEFAULT = getattr(dist_c10d, "SHRINK_DEFAULT", 0)
_ABORT = getattr(dist_c10d, "SHRINK_ABORT", 1)
# torch's constructor of the new group. Shrinking is unsupported in torch versions without it.
_CONSTRUCTOR = "_create_shrunk_process_group"


class Shrinkable:
    """Mixin that shrinks a group."""

    _comm: Any
    _rank: int
    _size: int
    _timeout: timedelta
    _all_ranks: Sequence[int]
    _group_store: Any
    _others: Mapping[str, object]
    _request: Request
    # Number of attempts to exclude these ranks; each attempt uses a separate store prefix.
    _tries: Counter[tuple[int, ...]]
    # torch's group counter at this group's creation.
    _groups_before: int
    _leave: Callable[[], None]
    abort: Callable[[], None]

    @property
    def supports_shrinking(self) -> bool:
        """False if devices use different backends: torch would shrink one backend and drop the others."""
        return not self._others and _patch_constructor()

    def shrink(self, ranks_to_exclude: Sequence[int], shrink_flags: int = _DEFAULT, opts_override: Any = None) -> Any:
        """Return a group of this group's remaining ranks in their order. All remaining ranks, and only they, call it.

        shrink_flags: SHRINK_ABORT aborts pending operations on all ranks before the new group is created;
        SHRINK_DEFAULT leaves them until then. This rank then leaves this group without waiting, and ranks still in it
        are notified. Raises ValueError for invalid ranks, and CollectiveTimeoutError naming the ranks that did not join
        within the group's timeout. After an error this group keeps its state, aborted or not.
        """
        if self._others:
            raise RuntimeError(
                f"shrink: the devices of this group have different backends ({self._request.backends}); make a new "
                "group of the remaining ranks with new_group(ranks, use_local_synchronization=True)"
            )
        without = self._excluded(ranks_to_exclude)
        if shrink_flags not in (_DEFAULT, _ABORT):
            raise ValueError(f"shrink: the flags are SHRINK_DEFAULT ({_DEFAULT}) or SHRINK_ABORT ({_ABORT})")
        if opts_override is not None:
            warnings.warn(f"smddp has no group options; {type(opts_override).__name__} is ignored", stacklevel=2)
        if shrink_flags == _ABORT:
            self.abort()
        self._tries[without] += 1
        excluded = "_".join(map(str, without))
        remaining = [rank for rank in range(self._size) if rank not in without]
        store = PrefixStore(f"shrunk/{excluded}/{self._tries[without]}", self._group_store)
        # As in reconfigure: the shrunk default group renumbers the global ranks.
        whole = is_default_group(self)
        make: Callable[..., Shrinkable] = type(self)
        group = make(
            store=store,
            group_store=store,
            rank=remaining.index(self._rank),
            size=len(remaining),
            timeout=self._timeout,
            name=f"{self._comm.name}:without:{excluded}",
            global_ranks=[] if whole else [self._all_ranks[rank] for rank in remaining],
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
                f"shrink: rank {self._rank} is among the excluded {list(ranks)}; only the remaining ranks may call it"
            )
        return without


def _patch_constructor() -> bool:
    """Makes torch's `shrink_group` return the smddp group; idempotent. Returns False if torch has no constructor."""
    create = getattr(dist_c10d, _CONSTRUCTOR, None)
    if create is not None and not hasattr(create, "__wrapped__"):
        setattr(dist_c10d, _CONSTRUCTOR, _with_our_group(create))
    return create is not None


def _with_our_group(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_shrunk(new_backend: Any, remaining_ranks: list[int], metadata: Any, is_default_group: bool) -> Any:
        if not isinstance(new_backend, SmddpDevice):
            return create(new_backend, remaining_ranks, metadata, is_default_group)
        group = new_backend.served_group()
        # torch continues with these objects, so change them in place.
        remaining_ranks[:] = group._all_ranks
        metadata["new_group_name"] = group.communicator.name
        dist_c10d._world.group_count = group._groups_before
        group._set_group_name(group.communicator.name)
        group._set_group_desc("default:shrunken" if is_default_group else f"{metadata['original_group_name']}:shrunk")
        return group

    return create_shrunk
