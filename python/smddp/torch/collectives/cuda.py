"""What one group needs to serve CUDA tensors. Made when the first one comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from smddp._native import core
from smddp.observability.log import tell, wanted
from smddp.torch import cuda
from smddp.torch.arguments import block, check_writable, readable
from smddp.torch.cuda_work import CudaWork, StagedWork

_CAPTURE = (
    "smddp cannot be captured into a CUDA graph yet, and the current stream is being captured: nothing was enqueued. "
    "Capture the parts between the collectives, or run this one outside of the capture."
)


class DeviceSide:
    """The CUDA devices that a group has met, and how its calls start on them.

    bound: the ordinal of the group's own device, or None.
    Raises RuntimeError where there is no CUDA driver.
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
        self._staging_told = False

    def check(self, tensor: Tensor) -> None:
        """Raises what speaks against a call on this tensor, before anything is enqueued."""
        device = tensor.get_device()
        if self._bound is not None and device != self._bound:
            raise ValueError(
                f"this group is bound to cuda:{self._bound} (device_id of init_process_group), the tensor is on "
                f"cuda:{device}; move it, or make a group without device_id"
            )
        if cuda.capturing(device):
            raise RuntimeError(_CAPTURE)
        self._met.add(device)

    def start(self, ways: tuple[Any, Any], call: Any, limit: float, now: bool, ranks: Sequence[int] | None) -> CudaWork:
        """Hand one call to the core, ordered after the current stream.

        ways: the communicator, and its short way if there is one, which serves this device from now on. now: the caller
        will not look at the handle, so the current stream waits at once.
        """
        comm, short = ways
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
        # After the call, which makes the stream where it is the first on this device.
        stream = self._stream(comm, short, device)
        tensors = list(_tensors(call.keep))
        work = CudaWork(native, device, call.outputs, call.after, tensors if call.after else (), ranks)
        waits = False
        try:
            waits = now and work.wait()
        finally:
            # A stream that waits needs no record: who gets the memory next, in its order, is after the call.
            if not waits:
                for tensor in tensors:
                    cuda.record(tensor, stream)
        return work

    def handle(self, native: Any, output: Tensor, ranks: Sequence[int] | None) -> CudaWork:
        """That of a call which the core has begun by itself (smddp._core.AtOnce)."""
        return CudaWork(native, output.get_device(), [output], (), (), ranks)

    def _stream(self, comm: Any, short: Any, device: int) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = cuda.external(comm.device_stream(device), device)
            if short is not None:
                short.meet(device, stream)
        return stream

    def settle(self, asked: Iterable[int | None]) -> None:
        """The host waits for the current streams of the devices in use and of those `asked` for, as barriers have it.

        asked: None stands for the group's own device, or the current one.

        Raises RuntimeError while one of them is being captured.
        """
        devices = set(self._met)
        for device in asked:
            devices.add(device if device is not None else cuda.here() if self._bound is None else self._bound)
        for device in sorted(devices):
            if cuda.capturing(device):
                raise RuntimeError(_CAPTURE)
            cuda.finish(device)

    # Messages between two ranks, by way of the host.

    def outgoing(self, tensor: Tensor) -> Tensor:
        """A copy of the tensor in host memory. Waits until the current stream has made it.

        Raises NoMemoryError as `block`.
        """
        self._tell_of_staging()
        device = tensor.get_device()
        source = readable(tensor).detach()
        block(source)
        host = cuda.pinned(source)
        host.copy_(source.view(-1), non_blocking=True)
        cuda.finish(device)
        return host

    def incoming(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Host memory for what is meant for the tensor, and the step that takes it there. Raises ValueError as
        check_writable, and NoMemoryError as `block`."""
        self._tell_of_staging()
        check_writable(tensor)
        block(tensor)
        host = cuda.pinned(tensor)
        return host, Upload(tensor, host, cuda.mark(tensor.get_device()))

    def message(
        self, native: Any, tensor: Tensor, after: Sequence[Callable[[], None]], ranks: Sequence[int] | None
    ) -> StagedWork:
        """The handle of a message that is under way."""
        return StagedWork(native, tensor.get_device(), [tensor], after, (tensor,), ranks)

    def _tell_of_staging(self) -> None:
        if not self._staging_told:
            self._staging_told = True
            if wanted():
                tell(f"group {self._group}: send and recv of CUDA tensors go through pinned host memory")


class Upload:
    """Takes a message from host memory to its tensor, on the current stream.

    begun: an event at the receive's place in the order of its caller's stream, which may still use the tensor.
    """

    __slots__ = ("_begun", "_host", "_tensor")

    def __init__(self, tensor: Tensor, host: Tensor, begun: Any) -> None:
        self._tensor = tensor
        self._host = host
        self._begun = begun

    def __call__(self) -> None:
        tensor = self._tensor
        cuda.wait_for(self._begun, tensor.get_device())
        # May run on a helper thread, where grad mode is on; and inference tensors only change in inference mode.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(self._host.view(tensor.shape), non_blocking=True)


def _tensors(kept: Any) -> Iterator[Tensor]:
    """Every tensor of nested sequences, once."""
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
