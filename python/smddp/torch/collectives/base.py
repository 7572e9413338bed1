"""Shared path of all collectives into the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from smddp.arrays.composite import one_call
from smddp.torch import profiling
from smddp.torch.arguments import check_dtype, describe
from smddp.torch.compat import profiler_enabled
from smddp.torch.dtypes import CODES, SUM
from smddp.torch.errors import translate
from smddp.torch.time_estimate import Estimating
from smddp.torch.work import DoneWork, SmddpWork, join

if TYPE_CHECKING:
    from smddp.torch.collectives.cuda import DeviceSide

# The numbers of smddp_plan::Collective.
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE, GATHER, SCATTER, ALL_TO_ALL, BARRIER = range(9)

UINT8 = CODES[torch.uint8]
# Reduction and factor of collectives without a reduction.
PLAIN = (SUM, 1.0)
_ZERO = timedelta(0)

# Shared handle of synchronous calls; it is immutable.
DONE = DoneWork([])

After = list[Callable[[], None]]


class OtherBackend(Protocol):
    """A backend of torch, whose collectives have the arguments of c10d's methods."""

    def __getattr__(self, name: str) -> Callable[..., Work]: ...


@dataclass(slots=True)
class Call:
    """Arguments of one collective call to the core.

    number, code: collective and dtype. like: a tensor on the call's device; None: the CPU. source, target: the core's
    blocks (see smddp._core). keep: objects kept alive until the call completes. outputs: the handle's results. after:
    callbacks once the data has arrived.
    """

    number: int
    code: int
    like: Tensor | None
    source: Any
    target: Any
    keep: object
    outputs: list[Tensor]
    after: Sequence[Callable[[], None]] = ()
    redop: tuple[int, float] = PLAIN
    root: int = 0


class Base(Estimating):
    """Group state that the collectives use. The group class sets the attributes below."""

    _rank: int
    # Global ranks, where they differ from the ranks in the group.
    _ranks: Sequence[int] | None
    # Backends of devices that smddp does not serve, by device type.
    _others: dict[str, OtherBackend]
    _serves_cpu: bool
    _serves_cuda: bool
    # CUDA's ordinal of the device that the group is bound to.
    _bound: int | None
    _cuda: DeviceSide | None = None
    # Fast path of common calls, if available; smddp._core.FastPath.
    _fast_path: Any = None

    def _usable_fast_path(self) -> Any:
        """Returns the fast path, or None in a coalescing block, in a time estimate and under a profiler."""
        if (self._states is not None and self._has_thread_state()) or (profiling.seen and profiler_enabled()):
            return None
        return self._fast_path

    def _fast_path_handle(self, native: Any, output: Tensor) -> Work:
        """Returns the handle of a device call on the fast path. native: the core's handle."""
        return self._device_side().handle(native, output, self._ranks)

    def _failed(self, error: BaseException) -> BaseException:
        """Ends this thread's block and estimate. error: raised by a public method. Returns the exception to raise."""
        if self._batch is not None:
            self._batch = None
            self._forget_coalescing()
        # torch leaves the estimate open, so every later call would silently transfer nothing.
        self._estimate = None
        return translate(error, self._ranks)

    def _forget_coalescing(self) -> None:
        """Removes an open block from torch's state, which would otherwise silently queue every later call."""

    def _on_cuda(self, tensor: Tensor) -> bool:
        """Returns whether a CUDA tensor's device is served by this group. Raises for an unsupported tensor, before
        anything is enqueued."""
        if not (self._serves_cuda and tensor.is_cuda):
            return False
        self._check_strided(tensor)
        self._device_side().check(tensor)
        return True

    def _device_side(self) -> DeviceSide:
        side = self._cuda
        if side is None:
            # Imported here: most processes have no CUDA tensor.
            from smddp.torch.collectives.cuda import DeviceSide

            side = self._cuda = DeviceSide(self._comm.name, self._bound)
        return side

    def _settle(self, device: torch.device | None, ordinals: Sequence[int]) -> None:
        """Synchronizes the host with this thread's work on the group's CUDA devices and on the requested devices.

        ordinals: a barrier's device_ids. device: of a barrier; without an index it means the group's device or the
        current device.
        """
        asked: set[int | None] = set()
        if self._serves_cuda:
            if device is not None and device.type == "cuda":
                asked.add(device.index)
            if asked <= {None} and ordinals:
                asked = set(ordinals)
        if self._cuda is None:
            if not asked and self._bound is None:
                return
            from smddp.torch import cuda

            if not cuda.in_use():
                return
        self._device_side().settle(asked)

    def _elsewhere(self, tensor: Tensor) -> OtherBackend:
        """Returns the backend of the tensor's device. Raises RuntimeError if the group has none."""
        kind = tensor.device.type
        backend = self._others.get(kind)
        if backend is None and kind == "cpu":
            raise RuntimeError(
                f"this group has no backend for CPU tensors ({describe(tensor)}); make it with "
                "init_process_group('smddp'), or name one: 'cpu:smddp,...'"
            )
        if backend is None:
            raise RuntimeError(
                f"smddp moves CPU and CUDA tensors, and this group has no backend for {kind}: {describe(tensor)} is on "
                f"{tensor.device}. Move it to the CPU, or give {kind} to a backend that serves it: "
                f"init_process_group('cpu:smddp,{kind}:{'smddp' if kind == 'cuda' else 'BACKEND'}')."
            )
        return backend

    def _check_strided(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:
            raise ValueError(f"smddp moves dense tensors; this one has layout {tensor.layout} ({describe(tensor)})")

    def _check_all_here(self, what: str, first: Tensor, others: Sequence[Tensor]) -> None:
        """Checks that all tensors are dense, with the device and dtype of `first`."""
        self._check_strided(first)
        on_cpu = first.is_cpu
        for index, tensor in enumerate(others):
            if tensor.is_cpu != on_cpu or (not on_cpu and tensor.device != first.device):
                raise ValueError(
                    f"{what}: tensors must be on one device, got {first.device} and {tensor.device} (tensor {index})"
                )
            self._check_strided(tensor)
        check_dtype(what, first, others)

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(f"{what}: invalid root rank {root} in a group of {self._size} ranks")

    def _start(self, call: Call, options: Any) -> Work:
        """Passes one call to the core. A synchronous call runs inline."""
        if self._estimate is not None:
            self._estimate.collective(call)
            return self._note(DoneWork(call.outputs))
        # Inlined: a `with` block would cost as much as the dispatch itself.
        span = None
        if profiling.seen and profiler_enabled():
            span = profiling.path_range(self._comm, call, self._size)
            span.__enter__()
        try:
            timeout = options.timeout
            limit = timeout.total_seconds() if timeout > _ZERO else 0.0
            now = self._batch is None and not options.asyncOp
            if call.like is not None and not call.like.is_cpu:
                work = self._device_side().start((self._comm, self._fast_path), call, limit, now, self._ranks)
                return DONE if now else self._note(work)
            native = self._comm.collective(
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
            )
        finally:
            if span is not None:
                span.__exit__(None, None, None)
        if now:
            for step in call.after:
                step()
            return DONE
        return self._note(SmddpWork(native, call.outputs, call.after, self._ranks))

    def _start_parts(self, parts: Iterable[Work], outputs: list[Tensor], options: Any) -> Work:
        """Starts all parts of a call and waits for them if the call is synchronous.

        parts: starts one call per part. All parts start before the first wait, so after an interrupt they continue and
        the other ranks' calls complete. An exception between two starts aborts the group.
        """
        block, self._batch = self._batch, []
        try:
            with one_call(self._comm, "a coalesced call"):
                work = join(list(parts), outputs)
        finally:
            self._batch = block
        if block is None and not options.asyncOp:
            work.wait()
        return self._note(work)

    def _note(self, work: Work) -> Work:
        batch = self._batch
        if batch is not None:
            batch.append(work)
        return work

    # Coalescing. torch's Python code uses the name with an underscore, its C++ code the name without.

    def _start_coalescing(self, device: torch.device) -> None:
        """Combines this thread's calls on this group into one handle, until `_end_coalescing`."""
        other = self._others.get(device.type)
        if other is not None:
            other._start_coalescing()
            return
        if self._batch is not None:
            raise RuntimeError("smddp: this thread has a coalescing block open in this group already")
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:
        other = self._others.get(device.type)
        if other is not None:
            return other._end_coalescing()
        batch, self._batch = self._batch, None
        if batch is None:
            raise RuntimeError("smddp: this thread has no coalescing block open in this group")
        return join(batch) if batch else DONE

    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def first_of(backend: OtherBackend, name: str, old_name: str) -> Callable[..., Work]:
    """Returns the method of another backend by its name, or by its old name if this torch lacks the new one."""
    method: Callable[..., Work] = getattr(backend, name if hasattr(backend, name) else old_name)
    return method


def check_pairs(what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if len(outputs) != len(inputs) or not inputs:
        raise ValueError(f"{what}: needs as many outputs as inputs, at least one, got {len(outputs)} and {len(inputs)}")
