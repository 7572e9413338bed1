"""Ranges of a call in torch's profiler: the call itself, and within it the path of its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from smddp.observability.info import COLLECTIVES
from smddp.torch.compat import record_range

# Collectives in which most ranks hold one part only.
_IN_PARTS = ("gather", "scatter")


# Set by the first call under a profiler; until then calls skip the check in the fast path.
seen = False


def call_range(label: str, arguments: Iterable[Any]) -> Any:
    """Returns the range "smddp:label" of one call; with `record_shapes` torch records the tensors' shapes."""
    global seen
    seen = True
    return _range(f"smddp:{label}", list(_tensors(arguments)), {})


def path_range(comm: Any, call: Any, size: int) -> Any:
    """Returns the range of one collective in the core, named by its path ("smddp way: shm mesh").

    call: a `collectives.base.Call`; size: ranks. With `record_shapes` the trace has its path, bytes, collective, group
    and seq; bytes count the whole buffer, on which the choice of the path depends.
    """
    collective = COLLECTIVES[call.number]
    nbytes = buffer_bytes(call, size)
    path = None
    if call.like is not None and not call.like.is_cpu:
        path = comm.device_path(call.like.get_device())
    path = path or comm.path(call.number, call.code, nbytes)
    return _path_range(comm, path, nbytes, collective)


def buffer_bytes(call: Any, size: int) -> int:
    """Returns the bytes of the whole buffer of a `collectives.base.Call` of `size` ranks."""
    collective = COLLECTIVES[call.number]
    width = 0 if call.like is None else call.like.element_size()
    if collective in _IN_PARTS:
        return width * size * _elements(call.source if collective == "gather" else call.target)
    return width * max(_elements(call.source), _elements(call.target))


def message_range(comm: Any, tensor: Tensor, what: str) -> Any:
    """Returns the range of one message. what: "send" or "recv"."""
    return _path_range(comm, comm.transports(), tensor.nbytes, what)


def _path_range(comm: Any, path: str, nbytes: int, what: str) -> Any:
    values = {"path": path, "bytes": nbytes, "collective": what, "group": comm.name, "seq": comm.sequence()}
    return _range(f"smddp way: {path}", [], values)


def _range(name: str, tensors: list[Tensor], values: dict[str, Any]) -> Any:
    return record_range(name, tensors, values)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _elements(blocks: Any) -> int:
    """Returns the number of elements of the core's blocks (see smddp._core)."""
    if blocks is None:
        return 0
    if isinstance(blocks, list):
        return sum(count for _, count in blocks)
    count = blocks[1]
    return count if isinstance(count, int) else sum(count)
