"""All uses of torch.cuda. Processes without CUDA tensors never call it, and tests replace it.

Devices are CUDA ordinals of this process. Streams of the core are raw handles (integers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from smddp.torch.compat import RAW_STREAM


def _stream_handle(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# Every call needs the raw handle of the current stream; a stream object for each would cost a microsecond.
_raw_stream: Callable[[int], int] = (
    RAW_STREAM.find_or_warn() if torch.backends.cuda.is_built() else None
) or _stream_handle

# By device, the stream that copies results if no thread waits for a call.
_sides: dict[int, Any] = {}


def in_use() -> bool:
    """Returns whether this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())


def here() -> int:
    """This thread's current device."""
    return torch.cuda.current_device()


def stream_of(device: int) -> int:
    """The raw handle of this thread's current stream."""
    return _raw_stream(device)


def capturing(device: int) -> bool:
    """Returns whether this thread's current stream is being captured into a graph."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def external(handle: int, device: int) -> Any:
    """Returns torch's object for a stream of the core."""
    return torch.cuda.ExternalStream(handle, device=torch.device("cuda", device))


def current(device: int) -> Any:
    """Returns torch's object for this thread's current stream."""
    return torch.cuda.current_stream(device)


def record(tensor: Tensor, stream: Any) -> None:
    """Delays reuse of the tensor's memory by torch's allocator until the work on `stream` is complete.

    The core keeps the tensors, but their storage may be resized to zero meanwhile.
    """
    tensor.record_stream(stream)


def mark(device: int) -> Any:
    """Records an event at the end of this thread's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(event: Any, device: int) -> None:
    """Makes this thread's current stream, not the host, wait for the event."""
    torch.cuda.current_stream(device).wait_event(event)


@contextmanager
def on_side(device: int) -> Iterator[None]:
    """Context in which the current stream is a side stream that callers do not use."""
    # The device first: a helper thread's device is 0, and restoring it from a stream would create a context there.
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
    """Returns a future whose callbacks run on separate streams, and whose waiters' streams wait for the results."""
    return Future(devices=[torch.device("cuda", device) for device in devices])


def pinned(like: Tensor) -> Tensor:
    """Returns pinned host memory for the elements of `like`, with one dimension."""
    # Explicit device: programs may set another default.
    return torch.empty(like.numel(), dtype=like.dtype, device="cpu", pin_memory=True)
