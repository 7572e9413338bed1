"""`smddp.bind`: a collective whose arguments are looked at once, for loops that make it again and again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, device

from smddp._native import core
from smddp.torch.arguments import describe, is_plain
from smddp.torch.collectives.base import Call
from smddp.torch.errors import translate
from smddp.torch.process_group import SmddpProcessGroup

if TYPE_CHECKING:
    from smddp._core import BoundCall

_CALLS = (
    "all_reduce all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all_single broadcast "
    "reduce gather scatter barrier"
).split()


class _Taken:
    """Takes the place of a group's time estimate (see `smddp.torch.time_estimate`) and records this thread's calls.

    The recorded calls move nothing.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def collective(self, call: Call) -> None:
        self.calls.append(call)


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """A collective that can be made again and again, each time on what the tensors then hold.

    function: one of torch.distributed's: all_reduce, all_gather, all_gather_into_tensor, reduce_scatter,
    reduce_scatter_tensor, all_to_all_single, broadcast, reduce, gather, scatter, barrier. args, kwargs: as it takes
    them, without async_op; the group is smddp's, the tensors are on the CPU and contiguous, and keep their memory.
    Nothing moves yet.

        sum_up = smddp.bind(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)
        sum_up()                            # as dist.all_reduce(tensor)
        sum_up.start(); ...; sum_up.wait()  # as a handle of async_op=True

    Other ranks may bind the same call or make it unbound. After the group was reconfigured or destroyed, a bound call
    raises ClosedError: bind it anew. torch's own hooks and its profiler do not hear of it; smddp's recorder does.

    Raises TypeError for another function, ValueError for async_op, another backend's group and tensors that cannot be
    bound, and whatever the function itself raises for its arguments.
    """
    name = getattr(function, "__name__", "")
    if name not in _CALLS or getattr(dist, name, None) is not function:
        raise TypeError(f"bind: {function!r} is none of torch.distributed's {', '.join(_CALLS)}")
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    if given.get("async_op"):
        raise ValueError("bind: a bound call has start() and wait() in place of async_op=True")
    tensors = list(_tensors(given.values()))
    for tensor in tensors:
        if not (tensor.is_cpu and is_plain(tensor)):
            raise ValueError(
                f"bind: tensors are on the CPU and contiguous, not {describe(tensor)} on {tensor.device} with strides "
                f"{tensor.stride()}"
            )
    group = _ours(given.get("group"))
    call = _taken(group, functools.partial(function, *args, **kwargs))
    ranks, limit = group._ranks, given.get("timeout")
    return core().BoundCall(
        group._comm,
        call.number,
        call.code,
        call.redop,
        call.root,
        call.source,
        call.target,
        tensors,
        0.0 if limit is None else limit.total_seconds(),
        lambda error: translate(error, ranks),
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _ours(group: Any) -> SmddpProcessGroup:
    """The group, or the part of it that serves the CPU."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("bind: there is no default process group; init_process_group('smddp') makes one")
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("bind: this rank is not in the group")
    if not isinstance(found, SmddpProcessGroup):
        found = found._get_backend(device("cpu"))
    if not isinstance(found, SmddpProcessGroup):
        raise ValueError(f"bind: the group's backend for CPU tensors is {found!r}, not smddp")
    return found


def _taken(group: SmddpProcessGroup, call: Callable[[], Any]) -> Call:
    """What the group would do for that."""
    if group._estimate is not None:
        raise RuntimeError("bind: this thread has a time estimate open on this group")
    taken = _Taken()
    group._estimate = taken
    try:
        call()
    finally:
        group._estimate = None
    if len(taken.calls) != 1 or taken.calls[0].after:
        raise ValueError("bind: this call is not one transfer between the tensors themselves")
    return taken.calls[0]
