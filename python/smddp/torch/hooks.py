"""Observers of a group (hooks, NaN check, flight recorder), and the torch group that dispatches calls to them.

Needs torch 2.14, which accepts a device's backend in Python. In an older torch all calls are direct: torch has no
hooks, and only `profiling.py` reports ranges to the profiler.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from smddp.torch import flight_recorder
from smddp.torch.compat import c10d
from smddp.torch.device_map import SmddpDevice, device_backend
from smddp.torch.dispatch import current_work

# Methods that torch's dispatcher does not find in a Python backend.
_NOT_DISPATCHED = {"gather_single"}
_TOO_OLD = "{}: hooks around the calls of a smddp group need torch 2.14 or later"


class ObservedGroup:
    """The part of a group that manages its observers.

    _has_observers: calls go through torch's dispatcher. Profilers and dispatch modes belong to a thread and are not
    counted.
    """

    _has_observers = False
    _device: Any
    _timeout: timedelta
    _group_store: Any
    _rank: int
    _size: int
    _all_ranks: Sequence[int]
    _register_devices: Callable[[Any, Any], None]
    group_name: str
    group_desc: str

    def _init_observers(self) -> None:
        """Called when the backends of the group are registered."""
        self._dispatcher: Any = None
        self._behind: Any = None
        # For each observer, the function that attaches it to a torch group, and the result of the attachment.
        self._observers: dict[object, Callable[[Any], Any] | None] = {}
        self._attached: dict[object, Any] = {}
        if dist.get_debug_level() != dist.DebugLevel.OFF:
            self._add_observer("TORCH_DISTRIBUTED_DEBUG")
        _patch_attach()

    def _move_observers(self) -> None:
        """Attaches all observers to a new dispatcher group, after the ranks of this group have changed."""
        self._dispatcher = None
        self._attached.clear()
        for key, attach in self._observers.items():
            if attach is not None:
                self._attached[key] = attach(self._dispatcher_group())

    def _add_observer(self, key: object, attach: Callable[[Any], Any] | None = None) -> None:
        self._observers[key] = attach
        self._has_observers = True

    def _remove_observer(self, key: object) -> None:
        self._observers.pop(key, None)
        self._attached.pop(key, None)
        self._has_observers = bool(self._observers)

    def _dispatched(self, method: str) -> Callable[..., Any] | None:
        """Returns the method of the dispatcher group; None if this torch has no such method."""
        if method in _NOT_DISPATCHED:
            return None
        return getattr(self._dispatcher_group(), method, None)

    def _dispatcher_group(self) -> Any:
        """Returns the torch group that dispatches to our backends, created on first use; None in an older torch."""
        # An older torch uses its own placeholder for our backend and calls only its queries.
        if self._dispatcher is None and isinstance(self._device, SmddpDevice):
            own: Any = ProcessGroup(self._group_store, self._rank, self._size)
            # A new backend each time: C++ copies rank and size from it when it is created.
            self._behind = device_backend(self, self._timeout)
            self._register_devices(own, self._behind)
            own._set_group_name(self.group_name)
            own._set_group_desc(self.group_desc)
            self._dispatcher = own
        return self._dispatcher

    # Python hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Calls `hook(PreHookArgs)` before each call. Raises NotImplementedError before torch 2.14."""
        self._hooks("register_pre_hook").register_pre_hook(hook_id, hook)
        self._add_observer(("pre", hook_id), lambda own: own.register_pre_hook(hook_id, hook))

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._hooks("unregister_pre_hook").unregister_pre_hook(hook_id)
        self._remove_observer(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Calls `hook(PostHookArgs)` after each call was issued. Raises NotImplementedError before torch 2.14."""

        def with_our_handle(args: Any) -> None:
            # torch passes its own handle, which does not report completion.
            args.work = current_work() or args.work
            hook(args)

        self._hooks("register_post_hook").register_post_hook(hook_id, with_our_handle)
        self._add_observer(("post", hook_id), lambda own: own.register_post_hook(hook_id, with_our_handle))

    def unregister_post_hook(self, hook_id: int) -> None:
        self._hooks("unregister_post_hook").unregister_post_hook(hook_id)
        self._remove_observer(("post", hook_id))

    def _hooks(self, name: str) -> Any:
        own = self._dispatcher_group()
        if not hasattr(own, name):
            raise NotImplementedError(_TOO_OLD.format(name))
        return own


def _patch_attach() -> None:
    """Attaches C++ hooks of a smddp group to its dispatcher group. Idempotent; other groups are unaffected."""
    for name, attached in (("NanCheckHook", _nan_check), ("FlightRecorderHook", _recorder)):
        hook = getattr(c10d, name, None)
        if hook is not None and not hasattr(hook.attach, "__wrapped__"):
            hook.attach = staticmethod(functools.wraps(hook.attach)(functools.partial(attached, hook.attach)))


def _nan_check(attach: Callable[..., Any], pg: Any) -> Any:
    own = pg._dispatcher_group() if isinstance(pg, ObservedGroup) else None
    if own is None:
        return attach(pg)
    pg._add_observer("NanCheckHook", attach)  # never removed: the group keeps the hook
    return attach(own)


def _recorder(attach: Callable[..., Any], pg: Any, global_ranks: Sequence[int] = ()) -> Any:
    own = pg._dispatcher_group() if isinstance(pg, ObservedGroup) else None
    if own is None or not _recorder_requested(sys._getframe(1).f_globals.get("__name__", "")):
        return attach(pg, global_ranks)
    handle = attach(own, global_ranks or list(pg._all_ranks))
    key = object()
    group: Any = weakref.ref(pg)
    pg._add_observer(key, lambda other: attach(other, list(group()._all_ranks)))
    # It records until the last reference to the handle is dropped.
    weakref.finalize(handle, _drop_observer, group, key).atexit = False
    flight_recorder.recording(pg._all_ranks[pg._rank])
    return handle


def _drop_observer(group: Any, key: object) -> None:
    if (pg := group()) is not None:
        pg._remove_observer(key)


def _recorder_requested(caller: str) -> bool:
    """Returns whether the program requested torch's recorder. caller: the module that attaches it.

    torch.distributed attaches a recorder to every group, which doubles the time of each call. A recorder therefore
    counts only if its buffer size is set or if another module attaches it.
    """
    if not caller.startswith("torch.distributed."):
        return True
    return any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
