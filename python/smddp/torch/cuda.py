"""All that smddp asks of torch.cuda, so that processes without CUDA tensors never touch it and tests can replace it.

Devices are CUDA ordinals of this process. Streams of the core are raw handles (integers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

_raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# The streams on which results are brought home when nobody waits for a call, by device.
_sides: dict[int, Any] = {}


def in_use() -> bool:
    """Whether this process has begun to use CUDA."""
    return torch.cuda.is_initialized()


def here() -> int:
    """This thread's current device."""
    return torch.cuda.current_device()


def stream_of(device: int) -> int:
    """The raw handle of this thread's current stream."""
    # Every call asks, and an object for each answer costs a microsecond.
    return _raw(device) if _raw is not None else torch.cuda.current_stream(device).cuda_stream


def capturing(device: int) -> bool:
    """Whether this thread's current stream is being captured into a graph."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def external(handle: int, device: int) -> Any:
    """torch's object for a stream of the core."""
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", device))


def current(device: int) -> Any:
    """torch's object for this thread's current stream."""
    return torch.cuda.current_stream(device)


def record(tensor: Tensor, stream: Any) -> None:
    """Have torch's allocator give the tensor's memory to nobody else before what `stream` holds by then is over.

    It matters although the core keeps the tensors: a storage may be resized to nothing while others still have it.
    """
    tensor.record_stream(stream)


def mark(device: int) -> Any:
    """An event at the end of this thread's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: Any, device: int) -> None:
    """This thread's current stream waits for the event; the host does not."""
    torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def on_side(device: int) -> Iterator[None]:
    """A block whose current stream is one that no caller uses."""
    # The device first: a helper thread's own is 0, and going back to it from a stream would make a context there.
    with torch.cuda.device(device):
        side = _sides.get(device)
        if side is None:
            side = _sides.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(side):
            yield


def finish(device: int) -> None:
    """Blocks the host until this thread's current stream is empty."""
    torch.cuda.current_stream(device).synchronize()


def future(devices: tuple[int, ...]) -> Future[Any]:
    """A future whose callbacks run on streams of their own, and whose waiters' streams wait for the results."""
    return Future(devices=[torch.device("cuda", device) for device in devices])


def pinned(like: Tensor) -> Tensor:
    """Host memory that the device copies from and to by itself, for as many elements, in one row."""
    # The device is named because programs may set another default.
    return torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
