"""Who listens to a group in torch's dispatcher, and the group of torch's own that calls go through for them.

From torch 2.14 on, where a device's backend may be written in Python. In an older torch calls go straight in, whoever
listens: there torch has no hooks, and the profiler gets its ranges from `profiling.py` alone.
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
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from smddp.torch import flight_recorder
from smddp.torch.device_map import SmddpDevice, device_backend
from smddp.torch.dispatch import current_work

# torch's dispatcher asks a backend in Python for all but these.
_NOT_ASKED = {"gather_single"}
_TOO_OLD = "{}: this torch runs no such hooks around the calls of a smddp group; torch 2.14 and later do"


class Listened:
    """The part of a group that torch's listeners are with.

    _heard: whether calls are to go through torch's dispatcher because of them. A profiler and dispatch modes belong to
    a thread and are not in it.
    """

    _heard = False
    _device: Any
    _timeout: timedelta
    _group_store: Any
    _rank: int
    _size: int
    _all_ranks: Sequence[int]
    _register_devices: Callable[[Any, Any], None]

    def _listen(self) -> None:
        """Called when the backends of the group are registered."""
        self._dispatcher: Any = None
        self._behind: Any = None
        # How each listener is put on a group of torch's own, and what that gave.
        self._listeners: dict[object, Callable[[Any], Any] | None] = {}
        self._attached: dict[object, Any] = {}
        if dist.get_debug_level() != dist.DebugLevel.OFF:
            self._listener("TORCH_DISTRIBUTED_DEBUG")
        _see_attached()

    def _listen_anew(self) -> None:
        """The group has other ranks, of which torch's own group knows nothing: listeners move to another one."""
        self._dispatcher = None
        self._attached.clear()
        for key, attach in self._listeners.items():
            if attach is not None:
                self._attached[key] = attach(self._torchs_group())

    def _listener(self, key: object, attach: Callable[[Any], Any] | None = None) -> None:
        self._listeners[key] = attach
        self._heard = True

    def _no_listener(self, key: object) -> None:
        self._listeners.pop(key, None)
        self._attached.pop(key, None)
        self._heard = bool(self._listeners)

    def _dispatched(self, method: str) -> Callable[..., Any] | None:
        """A method of torch's own group, whose calls pass the dispatcher; None where this torch has none."""
        if method in _NOT_ASKED:
            return None
        return getattr(self._torchs_group(), method, None)

    def _torchs_group(self) -> Any:
        """The group of torch's own with our backends behind it, or None. Made when first asked for."""
        # An older torch has a stand-in of its own for our backend, which it only asks.
        if self._dispatcher is None and isinstance(self._device, SmddpDevice):
            own: Any = ProcessGroup(self._group_store, self._rank, self._size)
            # Behind a backend of its own: what C++ takes for rank and size is as old as the backend.
            self._behind = device_backend(self, self._timeout)
            self._register_devices(own, self._behind)
            own._set_group_name(self.group_name)  # type: ignore[attr-defined]
            own._set_group_desc(self.group_desc)  # type: ignore[attr-defined]
            self._dispatcher = own
        return self._dispatcher

    # Hooks of Python

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have torch call `hook(PreHookArgs)` before each call. Raises NotImplementedError before torch 2.14."""
        self._hooks("register_pre_hook").register_pre_hook(hook_id, hook)
        self._listener(("pre", hook_id), lambda own: own.register_pre_hook(hook_id, hook))

    def unregister_pre_hook(self, hook_id: int) -> None:
        self._hooks("unregister_pre_hook").unregister_pre_hook(hook_id)
        self._no_listener(("pre", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Have torch call `hook(PostHookArgs)` after each call was issued. Raises as register_pre_hook."""

        def with_our_handle(args: Any) -> None:
            # torch's own stands for ours, but does not know when it is over.
            args.work = current_work() or args.work
            hook(args)

        self._hooks("register_post_hook").register_post_hook(hook_id, with_our_handle)
        self._listener(("post", hook_id), lambda own: own.register_post_hook(hook_id, with_our_handle))

    def unregister_post_hook(self, hook_id: int) -> None:
        self._hooks("unregister_post_hook").unregister_post_hook(hook_id)
        self._no_listener(("post", hook_id))

    def _hooks(self, name: str) -> Any:
        own = self._torchs_group()
        if not hasattr(own, name):
            raise NotImplementedError(_TOO_OLD.format(name))
        return own


def _see_attached() -> None:
    """Have hooks that C++ attaches to a group be attached where its calls pass. Idempotent; other groups' stay."""
    for name, attached in (("NanCheckHook", _nan_check), ("FlightRecorderHook", _recorder)):
        hook = getattr(c10d, name, None)
        if hook is not None and not hasattr(hook.attach, "__wrapped__"):
            hook.attach = staticmethod(functools.wraps(hook.attach)(functools.partial(attached, hook.attach)))


def _nan_check(attach: Callable[..., Any], pg: Any) -> Any:
    own = pg._torchs_group() if isinstance(pg, Listened) else None
    if own is None:
        return attach(pg)
    pg._listener("NanCheckHook", attach)  # for good: the group keeps the hook
    return attach(own)


def _recorder(attach: Callable[..., Any], pg: Any, global_ranks: Sequence[int] = ()) -> Any:
    own = pg._torchs_group() if isinstance(pg, Listened) else None
    if own is None or not _recorder_wanted(sys._getframe(1).f_globals.get("__name__", "")):
        return attach(pg, global_ranks)
    handle = attach(own, global_ranks or list(pg._all_ranks))
    key = object()
    group: Any = weakref.ref(pg)
    pg._listener(key, lambda other: attach(other, list(group()._all_ranks)))
    # It records until nobody has it any more.
    weakref.finalize(handle, _drop_listener, group, key).atexit = False
    flight_recorder.recording(pg._all_ranks[pg._rank])
    return handle


def _drop_listener(group: Any, key: object) -> None:
    if (pg := group()) is not None:
        pg._no_listener(key)


def _recorder_wanted(caller: str) -> bool:
    """Returns whether the program asked for torch's recorder. caller: the module that attaches it.

    torch.distributed attaches a recorder to every group, and each call takes twice as long with one. So it counts only
    where the size of its buffer is set, or where another module attaches it.
    """
    if not caller.startswith("torch.distributed."):
        return True
    return any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
