"""What torch's profiler shows of a call: the range that it runs in, and within it the way that its bytes take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from smddp.observability.info import COLLECTIVES
from smddp.torch.compat import record_range

# Collectives of which most ranks hold one part only.
_IN_PARTS = ("gather", "scatter")


# Whether any call of this process ran under a profiler yet: until then, nobody asks again on a call's way.
seen = False


def call_range(label: str, arguments: Iterable[Any]) -> Any:
    """The range "smddp:label" of one call; with `record_shapes` torch writes down what its tensors are like."""
    global seen
    seen = True
    return _range(f"smddp:{label}", list(_tensors(arguments)), {})


def way_range(comm: Any, call: Any, size: int) -> Any:
    """The range of one collective that the core takes over, named by the way it takes ("smddp way: shm mesh").

    call: a `collectives.base.Call`; size: ranks. Its values (path, bytes, collective, group, seq) are in the trace with
    `record_shapes`; bytes are those of the whole buffer, of which path and plan are a matter.
    """
    collective = COLLECTIVES[call.number]
    nbytes = buffer_bytes(call, size)
    path = None
    if call.like is not None and not call.like.is_cpu:
        path = comm.device_path(call.like.get_device())
    path = path or comm.path(call.number, call.code, nbytes)
    return _way(comm, path, nbytes, collective)


def buffer_bytes(call: Any, size: int) -> int:
    """Bytes of the whole buffer of a `collectives.base.Call` of so many ranks."""
    collective = COLLECTIVES[call.number]
    width = 0 if call.like is None else call.like.element_size()
    if collective in _IN_PARTS:
        return width * size * _elements(call.source if collective == "gather" else call.target)
    return width * max(_elements(call.source), _elements(call.target))


def message_range(comm: Any, tensor: Tensor, what: str) -> Any:
    """The same of one message that is sent or received ("send", "recv")."""
    return _way(comm, comm.way(), tensor.nbytes, what)


def _way(comm: Any, path: str, nbytes: int, what: str) -> Any:
    values = {"path": path, "bytes": nbytes, "collective": what, "group": comm.name, "seq": comm.sequence()}
    return _range(f"smddp way: {path}", [], values)


def _range(name: str, tensors: list[Tensor], values: dict[str, Any]) -> Any:
    try:
        return record_range(name, tensors, values)
    except TypeError:  # an older torch takes a name and no more
        return record_function(name)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _elements(blocks: Any) -> int:
    """Elements of the core's blocks (see smddp._core)."""
    if blocks is None:
        return 0
    if isinstance(blocks, list):
        return sum(count for _, count in blocks)
    count = blocks[1]
    return count if isinstance(count, int) else sum(count)
