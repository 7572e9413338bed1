"""Features of torch's groups and backends that smddp does not support.

Each capability query returns False; each method raises an error with an alternative. torch's default of a method
missing in the Python class calls itself until the stack overflows. The names are therefore read from torch's class, not
from a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Shown = TypeVar("Shown", bound=type)

_APART = "smddp cannot merge groups; make a new group with new_group"
_NO_WINDOWS = "smddp has no one-sided windows; use send and recv, or a collective"
_NO_TIMES = "smddp does not time collectives for torch; use torch.profiler, where they are ranges named smddp:..."
_NO_HOOKS = "smddp groups run no such hooks; register a post hook, or wait for the handles of the calls"
_NO_MEMORY = "smddp has no memory pool for torch; allocate shared host memory with smddp.empty"
_ALWAYS_THERE = "smddp keeps a group's resources until it is destroyed; use destroy_process_group"
_NO_BLOCKS = "smddp opens coalescing blocks on the group, not on a device's backend"

_REFUSED = {
    "_enable_collectives_timing": _NO_TIMES,
    "_end_coalescing": _NO_BLOCKS,
    "_register_on_completion_hook": _NO_HOOKS,
    "_start_coalescing": _NO_BLOCKS,
    "_wait_for_pending_works": "smddp has no completion hooks to wait for; wait for the handles of the calls",
    "mem_allocator": _NO_MEMORY,
    "memory_stats": "smddp has no memory statistics; `smddp info` shows the staging limits",
    "merge": _APART,
    "merge_remote_group": _APART,
    "new_window": _NO_WINDOWS,
    "register_abort_hook": _NO_HOOKS,
    "resume": _ALWAYS_THERE,
    "split": "smddp splits groups, not a device's backend; use the group's split_group",
    "suspend": _ALWAYS_THERE,
    "unregister_abort_hook": _NO_HOOKS,
}
# Other names under which torch's C++ code looks up a method.
_ALIASES = {"merge_remote_group": "mergeRemoteGroup"}


def answering(base: type) -> Callable[[Shown], Shown]:
    """Class decorator: refuses the queries and methods of torch's class `base` that the class does not define."""

    def wrap(shown: Shown) -> Shown:
        for name in dir(base):
            if _is_ours(shown, base, name):
                continue
            if name.lstrip("_").startswith("supports_") and isinstance(getattr(base, name), property):
                setattr(shown, name, property(_no))
            elif name in _REFUSED:
                refusal = _refusal(name, _REFUSED[name])
                setattr(shown, name, property(refusal) if isinstance(getattr(base, name), property) else refusal)
                if name in _ALIASES:
                    setattr(shown, _ALIASES[name], refusal)
        return shown

    return wrap


def _is_ours(shown: type, base: type, name: str) -> bool:
    return any(name in vars(each) for each in shown.__mro__ if not issubclass(base, each))


def _no(self: Any) -> bool:
    return False


def _refusal(name: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}: {instead}")

    refuse.__name__ = name
    return refuse
