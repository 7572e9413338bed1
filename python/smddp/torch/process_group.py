"""The process group that torch gets for backend="smddp"."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as dist_c10d

from smddp._constants import NAME
from smddp._native import core
from smddp.exit_hooks.at_exit import shut_down_at_exit
from smddp.observability import watcher
from smddp.observability.info import say_paths
from smddp.torch.batch_checks import check_batches
from smddp.torch.collectives import SmddpCollectives
from smddp.torch.collectives.base import BARRIER, PLAIN, UINT8
from smddp.torch.compat import c10d
from smddp.torch.device_map import (
    Request,
    creates_without_timeout,
    current_request,
    device_backend,
    mesh_siblings,
    others,
)
from smddp.torch.errors import translated
from smddp.torch.fast_path import fast_path
from smddp.torch.hooks import ObservedGroup
from smddp.torch.loopback import Mailbox
from smddp.torch.options import gather_options, seconds
from smddp.torch.placeholders import Inherited, NotConfigured
from smddp.torch.reconfigure import Reconfigurable, instance
from smddp.torch.rendezvous import MonitoredBarrier, connect
from smddp.torch.shrink import SHRINK, Shrinkable
from smddp.torch.unsupported import answering

# Open groups of this process. torch's C++ code may hold a group longer than Python does, so this reference keeps the
# Python object alive until shutdown or abort.
_open: dict[int, SmddpProcessGroup] = {}
_all: weakref.WeakSet[SmddpProcessGroup] = weakref.WeakSet()
_fork_hook = False


def create(options: Any, backend_options: Any) -> SmddpProcessGroup:
    """Creator that torch calls: returns one connected group."""
    if backend_options is not None:
        warnings.warn(f"smddp has no group options; {type(backend_options).__name__} is ignored", stacklevel=2)
    request = current_request()
    if request.device_id is None:
        request.device_id = _device_of_default_group()
    store = options.store
    # torch adds the device's prefix to the store of the requested device.
    group_store = getattr(store, "underlying_store", store)
    return SmddpProcessGroup(
        store=store,
        group_store=group_store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=_default_group_timeout() or options.timeout,
        name=str(options.group_id),
        global_ranks=list(options.global_ranks_in_group),
        request=request,
        connected=not getattr(options, "enable_reconfigure", False),
    )


@answering(ProcessGroup)
class SmddpProcessGroup(Reconfigurable, Shrinkable, SmddpCollectives, ObservedGroup, ProcessGroup):  # type: ignore[misc]
    """torch's process group with smddp's collectives.

    store: for this group's keys. group_store: the same without a device's prefix.
    global_ranks: empty for the group of all ranks, as in torch. connected: False if the first `reconfigure` sets the
    ranks. made_by: the creating call for errors, if torch did not create the group.
    """

    def __init__(
        self,
        *,
        store: Any,
        group_store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        global_ranks: list[int],
        request: Request,
        connected: bool = True,
        made_by: str | None = None,
    ) -> None:
        try:
            ProcessGroup.__init__(self, group_store, rank, size)
        except TypeError:
            # Older versions of torch accept a store only for groups written in C++.
            ProcessGroup.__init__(self, rank, size)
        self._store = store
        self._group_store = group_store
        self._timeout = timeout
        self._request = request
        self._serves_cpu = request.backends.get("cpu") == NAME
        self._serves_cuda = request.backends.get("cuda") == NAME
        self._bound = _ordinal(request.device_id) if self._serves_cuda else None
        _watch_forks()
        shut_down_at_exit()
        self._others = others(request, group_store, rank, size, timeout, name, global_ranks or list(range(size)))
        self._reconfigurable = not connected
        self._closing: Any = None
        self._instance = instance()
        self._uuids: set[int] = set()
        self._tries: Counter[tuple[int, ...]] = Counter()
        self._become(name, rank, size, global_ranks)
        if connected:
            known = None if made_by == SHRINK else _in_default_group(self._all_ranks)
            call = made_by or ("new_group" if known else "init_process_group")
            self._connect(store, call, name, timeout, known)
        else:
            self._hold(NotConfigured(name, "has no ranks yet"))
        self._device = device_backend(self, timeout)
        self._register_devices(self, self._device)
        self._init_observers()
        _all.add(self)
        self._opened(connected)

    def _become(self, name: str, rank: int, size: int, global_ranks: Sequence[int]) -> None:
        """Set this rank and the size of the group."""
        self._rank = rank
        self._size = size
        self._ranks = global_ranks if list(global_ranks) not in ([], list(range(size))) else None
        self._all_ranks: Sequence[int] = global_ranks or range(size)
        self._mailbox = Mailbox(rank, name)
        self._sent: dict[int, tuple[int, int]] = {}
        self._count_sent = threading.RLock()  # a signal handler may call in between
        self._cuda = None
        self._forget_threads()

    def _connect(self, store: Any, call: str, name: str, limit: timedelta, known: Any = None) -> None:
        """Connects to the group's other ranks through the store. Arguments and errors: see `rendezvous.connect`."""
        comm = connect(store, call, name, self._rank, self._size, limit.total_seconds(), self._ranks, known)
        comm.set_timeout(self._timeout.total_seconds())
        self._hold(comm)
        self._monitored = MonitoredBarrier(store, name, self._rank, self._size, self._ranks, self._own_barrier)

    def _opened(self, connected: bool = True) -> None:
        """Registers the group as open. connected: False if its ranks connect later."""
        _open[id(self)] = self
        if connected:
            say_paths(self._comm)
        watcher.start(self._all_ranks[self._rank])

    def _hold(self, comm: Any) -> None:
        """Sets the group's communicator and closes the previous one. `comm` is closed with the group at the latest."""
        before, self._comm = self._closing, comm
        self._fast_path = fast_path(comm, self._serves_cpu) if self._serves_cpu or self._serves_cuda else None
        if before is not None:
            before()
        self._closing = weakref.finalize(self, _close, comm, os.getpid())
        self._closing.atexit = False

    def _register_devices(self, group: Any, ours: Any) -> None:
        """Register the backend of each device with a torch group: this group or its observed group (hooks.py).

        ours: the backend of the devices that smddp serves.
        """
        custom = ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        # Set it first: torch passes it to every backend registered afterwards.
        if self._request.device_id is not None and self._shows_device(self._request.device_id):
            group.bound_device_id = self._request.device_id
        for device, backend in self._request.backends.items():
            if backend == NAME:
                group._register_backend(torch.device(device), custom, ours)
        for device, other in self._others.items():
            kind = dist_c10d.Backend.backend_type_map.get(self._request.backends[device], custom)
            group._register_backend(torch.device(device), kind, other)

    def _shows_device(self, device: torch.device) -> bool:
        """Returns whether to expose the group's bound device to torch.

        DeviceMesh derives groups from a bound group by `split_group`, which raises if a substitute serves our backend
        (see device_backend). From an unbound group it uses `new_group`, which works.
        """
        return self._request.backends.get(device.type) != NAME or getattr(self._device, "supports_splitting", False)

    # Rank and size

    def getBackendName(self) -> str:
        return NAME

    name = getBackendName

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    @property
    def communicator(self) -> Any:
        """The native communicator (smddp._core.Comm)."""
        return self._comm

    @property
    def sent(self) -> dict[int, tuple[int, int]]:
        """Started sends by the receiver's rank in this group: number of messages, and their bytes."""
        with self._count_sent:
            return dict(self._sent)

    def _get_sequence_number_for_group(self) -> int:
        return int(self._comm.sequence())

    def _set_sequence_number_for_group(self) -> None:
        """Returns the sequence number; the core counts operations from the group's first."""

    def get_error(self) -> Any:
        """As torch's backends report it: a member of ErrorType."""
        error = self._comm.error()
        native = core()
        if error is None:
            return c10d.ErrorType.SUCCESS
        if isinstance(error, native.CollectiveTimeoutError):
            return c10d.ErrorType.TIMEOUT
        if isinstance(error, native.PeerLostError):
            return c10d.ErrorType.REMOTE_ERROR
        return c10d.ErrorType.COMM_ERROR

    # Timeouts

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the default deadline of later calls."""
        self._timeout = timeout
        self._comm.set_timeout(timeout.total_seconds())
        for other in self._unique_others():
            set_default = getattr(other, "set_timeout", None) or getattr(other, "_set_default_timeout", None)
            if set_default is not None:
                set_default(timeout)

    setTimeout = _set_default_timeout = set_timeout

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Does nothing, as torch permits: a call's timeout and `set_timeout` are exact."""

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False, *, opts: Any = None) -> None:
        """Barrier that names the missing ranks. timeout: timedelta; None: the group's."""
        options = gather_options(c10d.BarrierOptions, timeout if timeout is not None else opts)
        if isinstance(timeout, timedelta) and timeout <= timedelta(0):
            limit = 0.0
        else:
            limit = seconds(options) or self._timeout.total_seconds()
        self._monitored(limit, wait_all_ranks)

    def _own_barrier(self, limit: float) -> None:
        """Barrier with a deadline of `limit` seconds. Raises as any collective."""
        with translated(self._ranks):
            self._comm.collective(BARRIER, UINT8, *PLAIN, 0, None, None, (), limit, False)

    # Leaving

    def shutdown(self) -> None:
        """Leave the group together with the other ranks. Idempotent.

        Raises MismatchError for mismatched calls that no call has reported. While another exception propagates, it
        leaves at once and raises nothing, so that the first exception is reported.
        """
        first = self._forget()
        try:
            if first and sys.exc_info()[0] is None:
                with translated(self._ranks):
                    _leave_together(self._comm)
        finally:
            self._comm.close()
            self._mailbox.close()
            for other in self._unique_others() if first else ():
                shutdown = getattr(other, "shutdown", None)
                if shutdown is not None:
                    shutdown()

    def abort(self) -> None:
        """Abort pending calls on all ranks. Does not wait for them.

        A group made with enable_reconfigure has no error afterwards and can be reconfigured.
        """
        self._forget()
        self._mailbox.close()
        self._comm.abort(f"the group was aborted by rank {self._all_ranks[self._rank]}")
        if self._reconfigurable:
            self._hold(NotConfigured(self._comm.name, "was aborted"))
        for other in self._unique_others():
            abort = getattr(other, "abort", None)
            if abort is not None:
                abort()

    def _leave(self) -> None:
        """Leave at once without waiting for the other ranks."""
        self._forget()
        self._mailbox.close()
        self._comm.close_in_background()

    def _forget(self) -> bool:
        watcher.update()
        return _open.pop(id(self), None) is not None

    def _unique_others(self) -> list[Any]:
        return list({id(other): other for other in self._others.values()}.values())

    def _forget_coalescing(self) -> None:
        dist_c10d._world.pg_coalesce_state.pop(self, None)

    # New groups from this one

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> SmddpProcessGroup | None:
        """Return the group of `new_ranks` (ranks in this group) in that order; None on all other ranks."""
        if opts is not None:
            warnings.warn(f"smddp has no group options; {type(opts).__name__} is ignored", stacklevel=2)
        ranks = list(new_ranks)
        if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < self._size for rank in ranks):
            raise ValueError(f"split_group: {ranks} are not different ranks of a group of {self._size}")
        if self._rank not in ranks:
            return None
        number = self._comm.sequence()
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}:{number}"
        wanted = {device.type for device in device_types} if device_types is not None else None
        backends = {
            device: backend for device, backend in self._request.backends.items() if not wanted or device in wanted
        }
        if NAME not in backends.values():
            raise ValueError(f"split_group: none of {sorted(backends)} is served by smddp; use new_group")
        store = PrefixStore(f"{name}/", self._group_store)
        group = SmddpProcessGroup(
            store=store,
            group_store=store,
            rank=ranks.index(self._rank),
            size=len(ranks),
            timeout=timeout or self._timeout,
            name=name,
            global_ranks=[self._all_ranks[rank] for rank in ranks],
            request=Request(backends, None, self._request.device_id if "cuda" in backends else None),
            made_by=f"split_group #{number}",
        )
        group._set_group_name(name)  # type: ignore[arg-type]  # torch: a NewType of str
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    splitGroup = split_group


check_batches(SmddpProcessGroup)


def _device_of_default_group() -> torch.device | None:
    """Returns the device that torch passes on to new groups; None if not exposed (see _shows_device)."""
    default = dist_c10d.GroupMember.WORLD
    return default._request.device_id if isinstance(default, SmddpProcessGroup) else None


def _default_group_timeout() -> timedelta | None:
    """Returns the default group's timeout for a group that torch creates without one; otherwise None.

    torch passes its constant of 30 minutes to such a group, whatever the timeout of the default group.
    """
    default = dist_c10d.GroupMember.WORLD
    if isinstance(default, SmddpProcessGroup) and creates_without_timeout():
        return default._timeout
    return None


def _in_default_group(ranks: Sequence[int]) -> tuple[Any, list[int], list[list[int]]] | None:
    """Return the default group's communicator, these ranks in it, and all groups of their mesh dimension, if known.

    None without a default group of smddp.
    """
    default = dist_c10d.GroupMember.WORLD
    comm = default.communicator if isinstance(default, SmddpProcessGroup) else None
    return (comm, list(ranks), mesh_siblings(ranks)) if isinstance(comm, core().Comm) else None


def _ordinal(device: torch.device | None) -> int | None:
    return device.index if device is not None and device.type == "cuda" else None


class _LeaveBudget:
    """Time budget in seconds that consecutive group shutdowns share: a rank late for one is late for all."""

    left = 0.0
    until = 0.0


def _leave_together(comm: Any) -> None:
    begun = time.monotonic()
    if begun > _LeaveBudget.until:
        _LeaveBudget.left = comm.leave_seconds()
    try:
        comm.finish(_LeaveBudget.left)
    finally:
        ended = time.monotonic()
        _LeaveBudget.left = max(_LeaveBudget.left - (ended - begun), 0.0)
        _LeaveBudget.until = ended + 1


def _close(comm: Any, owner: int) -> None:
    if os.getpid() == owner:
        comm.close_in_background()


def _in_child() -> None:
    for group in list(_all):
        if not isinstance(group._comm, Inherited):
            group._fast_path = None
            group._comm = Inherited(group._comm, str(group._request and group.group_name))
            # Keep the group alive too: closing its store could remove the parent's file.
            _kept.extend((group._comm, group))
    _open.clear()


_kept: list[Any] = []


def _watch_forks() -> None:
    global _fork_hook
    if not _fork_hook:
        _fork_hook = True
        os.register_at_fork(after_in_child=_in_child)


def open_groups() -> list[SmddpProcessGroup]:
    """Returns the open groups of this process that have ranks."""
    return [group for group in list(_open.values()) if not isinstance(group.communicator, NotConfigured)]
