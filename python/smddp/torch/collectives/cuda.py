"""CUDA side of a group, created for its first CUDA tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from smddp._native import core
from smddp.observability.log import info, is_enabled
from smddp.torch import cuda
from smddp.torch.arguments import block, check_writable, readable
from smddp.torch.cuda_work import CudaWork, StagedWork

_CAPTURE = (
    "smddp cannot be captured into a CUDA graph yet, and the current stream is being captured: nothing was enqueued. "
    "Capture the parts between the collectives, or run this one outside of the capture."
)


class DeviceSide:
    """The CUDA devices that a group uses, and the start of its calls on them.

    bound: the ordinal of the device that the group is bound to, or None.
    Raises RuntimeError without a CUDA driver.
    """

    def __init__(self, group: str, bound: int | None) -> None:
        found = core().cuda()
        if not found["found"]:
            raise RuntimeError(f"smddp cannot serve CUDA tensors here: {found['why']}")
        self._group = group
        self._bound = bound
        self._met = set() if bound is None else {bound}
        # torch's objects for the core's streams, by device.
        self._streams: dict[int, Any] = {}
        self._staging_reported = False

    def check(self, tensor: Tensor) -> None:
        """Raises the error of an invalid call on this tensor, before anything is enqueued."""
        device = tensor.get_device()
        if self._bound is not None and device != self._bound:
            raise ValueError(
                f"this group is bound to cuda:{self._bound} (device_id of init_process_group), the tensor is on "
                f"cuda:{device}; move it, or make a group without device_id"
            )
        if cuda.capturing(device):
            raise RuntimeError(_CAPTURE)
        self._met.add(device)

    def start(
        self, paths: tuple[Any, Any], call: Any, limit: float, now: bool, ranks: Sequence[int] | None
    ) -> CudaWork:
        """Starts one call in the core, ordered after the current stream.

        paths: the communicator and its fast path, if any, which serves this device from now on. now: the caller does
        not use the handle, so the current stream waits immediately.
        """
        comm, fast = paths
        device = call.like.get_device()
        native = comm.collective(
            call.number,
            call.code,
            call.redop[0],
            call.redop[1],
            call.root,
            call.source,
            call.target,
            call.keep,
            limit,
            not now,
            device=device,
            stream=cuda.stream_of(device),
        )
        # After the call: the first call on a device creates the stream.
        stream = self._stream(comm, fast, device)
        tensors = list(_tensors(call.keep))
        work = CudaWork(native, device, call.outputs, call.after, tensors if call.after else (), ranks)
        waits = False
        try:
            waits = now and work.wait()
        finally:
            # A waiting stream needs no record: later uses of the memory are ordered after the call.
            if not waits:
                for tensor in tensors:
                    cuda.record(tensor, stream)
        return work

    def handle(self, native: Any, output: Tensor, ranks: Sequence[int] | None) -> CudaWork:
        """Returns the handle of a call that the core's fast path has started (smddp._core.FastPath)."""
        return CudaWork(native, output.get_device(), [output], (), (), ranks)

    def _stream(self, comm: Any, fast: Any, device: int) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = cuda.external(comm.device_stream(device), device)
            if fast is not None:
                fast.add_device(device, stream)
        return stream

    def settle(self, asked: Iterable[int | None]) -> None:
        """Blocks the host until the current streams of the used and the `asked` devices are empty, for barriers.

        asked: ordinals; None is the group's own device, or the current one.

        Raises RuntimeError while one of the streams is being captured.
        """
        devices = set(self._met)
        for device in asked:
            devices.add(device if device is not None else cuda.here() if self._bound is None else self._bound)
        for device in sorted(devices):
            if cuda.capturing(device):
                raise RuntimeError(_CAPTURE)
            cuda.finish(device)

    # Messages between two ranks, staged in host memory.

    def outgoing(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the tensor in host memory. Waits until the current stream has copied it.

        Raises NoMemoryError as `block`.
        """
        self._report_staging()
        device = tensor.get_device()
        source = readable(tensor).detach()
        block(source)
        host = cuda.pinned(source)
        host.copy_(source.view(-1), non_blocking=True)
        cuda.finish(device)
        return host

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns host memory for a message, and the step that copies it to the tensor.

        Raises ValueError as check_writable, and NoMemoryError as `block`.
        """
        self._report_staging()
        check_writable(tensor)
        block(tensor)
        host = cuda.pinned(tensor)
        return host, Upload(tensor, host, cuda.mark(tensor.get_device()))

    def message(
        self, native: Any, tensor: Tensor, after: Sequence[Callable[[], None]], ranks: Sequence[int] | None
    ) -> StagedWork:
        """Returns the handle of a pending message."""
        return StagedWork(native, tensor.get_device(), [tensor], after, (tensor,), ranks)

    def _report_staging(self) -> None:
        if not self._staging_reported:
            self._staging_reported = True
            if is_enabled():
                info(f"group {self._group}: send and recv of CUDA tensors go through pinned host memory")


class Upload:
    """Copies a message from host memory to its tensor, on the current stream.

    begun: an event on the stream that called the receive, which may still use the tensor.
    """

    __slots__ = ("_begun", "_host", "_tensor")

    def __init__(self, tensor: Tensor, host: Tensor, begun: Any) -> None:
        self._tensor = tensor
        self._host = host
        self._begun = begun

    def __call__(self) -> None:
        tensor = self._tensor
        cuda.wait_for(self._begun, tensor.get_device())
        # May run on a helper thread, where grad mode is on. Inference tensors are writable in inference mode only.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(self._host.view(tensor.shape), non_blocking=True)


def _tensors(kept: Any) -> Iterator[Tensor]:
    """Yields every tensor of nested sequences once."""
    seen: set[int] = set()
    waiting = [kept]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif item is not None:
            waiting.extend(item)
