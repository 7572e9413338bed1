"""What torch asks of a group and of its backend besides collectives, and smddp does not have.

Each question gets "no", each call an error that says what to do instead. torch looks an answer up in Python before it
gives its own; where a class in Python has none, what it finds there is its own question, until Python's stack is full.
So the questions are taken from torch's class, whichever it has, and not from a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Shown = TypeVar("Shown", bound=type)

_APART = "smddp makes no group of parts of others; make a new group with new_group"
_NO_WINDOWS = "smddp has no one-sided windows; use send and recv, or a collective"
_NO_TIMES = "smddp does not time collectives for torch; use torch.profiler, where they are ranges named smddp:..."
_NO_HOOKS = "smddp groups run no such hooks; register a post hook, or wait for the handles of the calls"
_NO_MEMORY = "smddp takes any tensor as it is and has no pool for torch; smddp.empty is what ranks of a host share"
_ALWAYS_THERE = "smddp keeps what a group needs until it is destroyed; use destroy_process_group"
_NO_BLOCKS = "smddp opens coalescing blocks on the group and not on a device's backend, and starts each call at once"

_REFUSED = {
    "_enable_collectives_timing": _NO_TIMES,
    "_end_coalescing": _NO_BLOCKS,
    "_register_on_completion_hook": _NO_HOOKS,
    "_start_coalescing": _NO_BLOCKS,
    "_wait_for_pending_works": "smddp has no completion hooks to wait for; wait for the handles of the calls",
    "mem_allocator": _NO_MEMORY,
    "memory_stats": "smddp keeps no such counts; `smddp info` shows what staging it may use",
    "merge": _APART,
    "merge_remote_group": _APART,
    "new_window": _NO_WINDOWS,
    "register_abort_hook": _NO_HOOKS,
    "resume": _ALWAYS_THERE,
    "split": "smddp splits groups and not a device's backend; use the group's split_group",
    "suspend": _ALWAYS_THERE,
    "unregister_abort_hook": _NO_HOOKS,
}
# Under these torch's C++ looks for a method in Python where it has another name there.
_ALIASES = {"merge_remote_group": "mergeRemoteGroup"}


def answering(base: type) -> Callable[[Shown], Shown]:
    """Decorator of a class in Python: all that torch's class `base` asks or has and the class leaves out is refused."""

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
