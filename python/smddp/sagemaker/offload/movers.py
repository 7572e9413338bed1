"""Copies between device and host: an interface, a synchronous version and a version on accelerator streams.

:meth:`store` and :meth:`load` return a *transfer*; ``None`` means that it has ended already.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from smddp.sagemaker.offload.pool import HostPool


class Mover(Protocol):
    """Copies between device tensors and host buffers of ``pool``."""

    pool: HostPool

    def store(self, source: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """Begin copying ``source`` to ``host`` once the transfer ``after`` has ended."""

    def load(self, host: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        """Begin copying ``host`` to ``target`` once the transfer ``after`` has ended."""

    def wait(self, transfer: Any) -> None:
        """Order later operations of the computation after ``transfer``."""

    def done(self, transfer: Any) -> bool:
        """Returns True if ``transfer`` has ended; never blocks."""

    def part_with(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor``, which the caller releases, until its pending copy ends."""


class HostMover:
    """Synchronous copies for CPU tensors, with the schedule of a GPU."""

    def __init__(self) -> None:
        self.pool = HostPool()

    def store(self, source: torch.Tensor, host: torch.Tensor, after: Any) -> None:
        host.copy_(source)

    def load(self, host: torch.Tensor, target: torch.Tensor, after: Any) -> None:
        target.copy_(host)

    def wait(self, transfer: Any) -> None:
        pass

    def done(self, transfer: Any) -> bool:
        return True

    def part_with(self, tensor: torch.Tensor) -> None:
        pass


class StreamMover:
    """Copies on two side streams, one per direction, so that both run beside the computation.

    ``device_module`` is torch.cuda or another accelerator's module with the same Stream, Event, current_stream
    and stream(). The computing stream owns all device memory: it allocates it, and frees it only after a wait for
    the copy, or by :meth:`part_with`.
    """

    def __init__(self, device: torch.device, device_module: Any = None, pin_memory: bool = True) -> None:
        self._device = device
        self._module = device_module if device_module is not None else torch.get_device_module(device)
        self._out = self._module.Stream(device=device)
        self._in = self._module.Stream(device=device)
        self.pool = HostPool(pin_memory=pin_memory)

    def store(self, source: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        return self._copy(self._out, host, source, after)

    def load(self, host: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        return self._copy(self._in, target, host, after)

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        # Earlier operations of the computation may still write the source or use the target's memory.
        stream.wait_stream(self._module.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
        event = self._module.Event()
        event.record(stream)
        return event

    def wait(self, transfer: Any) -> None:
        if transfer is not None:
            self._module.current_stream(self._device).wait_event(transfer)

    def done(self, transfer: Any) -> bool:
        return transfer is None or transfer.query()

    def part_with(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._out)
        tensor.record_stream(self._in)


def mover_for(device: torch.device) -> Mover:
    """A new mover for tensors on ``device``."""
    return HostMover() if device.type == "cpu" else StreamMover(device)
