"""`smddp.bind`: a collective whose arguments are checked once, for repeated calls in loops."""

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


class _CallRecorder:
    """Records this thread's calls, which send no data. Replaces a group's `smddp.torch.time_estimate.Estimate`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def collective(self, call: Call) -> None:
        self.calls.append(call)


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BoundCall:
    """Returns a collective that can be called repeatedly, each time on the tensors' current values.

    Other ranks may bind the same call or make it unbound. After the group was reconfigured or destroyed, a bound call
    raises ClosedError: bind it again. torch's hooks and profiler do not record bound calls; smddp's recorder does.

    Args:
        function: One of torch.distributed's: all_reduce, all_gather, all_gather_into_tensor, reduce_scatter,
            reduce_scatter_tensor, all_to_all_single, broadcast, reduce, gather, scatter, barrier.
        *args: Its arguments, with contiguous CPU tensors that keep their memory. No data is sent yet.
        **kwargs: Its arguments by name, without `async_op`, with a smddp group.

    Returns:
        The bound call.

    Raises:
        TypeError: `function` is another function.
        ValueError: `async_op` is given, the group has another backend, or a tensor cannot be bound.

    Example:
        >>> sum_up = smddp.bind(dist.all_reduce, tensor, op=dist.ReduceOp.SUM)
        >>> sum_up()  # as dist.all_reduce(tensor)
        >>> sum_up.start()  # as async_op=True
        >>> sum_up.wait()
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
    group = _smddp_group(given.get("group"))
    call = _recorded_call(group, functools.partial(function, *args, **kwargs))
    ranks, limit = group._ranks, given.get("timeout")
    bound: BoundCall = core().BoundCall(
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
    return bound


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _smddp_group(group: Any) -> SmddpProcessGroup:
    """Returns the group, or its backend for the CPU. Raises ValueError if that is not smddp."""
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise ValueError("bind: no default process group; call init_process_group('smddp') first")
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("bind: this rank is not in the group")
    if not isinstance(found, SmddpProcessGroup):
        found = found._get_backend(device("cpu"))
    if not isinstance(found, SmddpProcessGroup):
        raise ValueError(f"bind: the group's backend for CPU tensors is {found!r}, not smddp")
    return found


def _recorded_call(group: SmddpProcessGroup, call: Callable[[], Any]) -> Call:
    """Returns the core call that `call` makes on the group."""
    if group._estimate is not None:
        raise RuntimeError("bind: this thread has a time estimate open on this group")
    taken = _CallRecorder()
    group._estimate = taken
    try:
        call()
    finally:
        group._estimate = None
    if len(taken.calls) != 1 or taken.calls[0].after:
        raise ValueError("bind: expected one call on the tensors' own memory; this one needs copies or several calls")
    return taken.calls[0]
