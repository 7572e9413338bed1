"""Record of one saved tensor: location of its bytes, and its exact reconstruction."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from smddp.sagemaker.offload.movers import Mover


@dataclass(frozen=True)
class Layout:
    """Size, strides and dtype of a tensor, and its copied elements.

    ``span`` is the number of elements between the first and the last one. Where the tensor fills it (dense in
    any order of dimensions, or expanded), the span travels as one flat copy; a tensor with gaps travels compact.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    span: int
    flat: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride))
        return cls(size, stride, tensor.dtype, tensor.device, span, span <= tensor.numel())

    @property
    def nbytes(self) -> int:
        elements = self.span if self.flat else torch.Size(self.size).numel()
        return elements * self.dtype.itemsize

    def moving_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor of this layout that is copied to or from :meth:`on_host`."""
        return tensor.as_strided((self.span,), (1,)) if self.flat else tensor

    def on_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """The view of a host buffer that holds the moving part."""
        typed = buffer[: self.nbytes].view(self.dtype)
        return typed if self.flat else typed.view(self.size)

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this layout on its device."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class VersionWatch:
    """Detects in-place modification of a saved tensor without retaining its memory.

    A detached alias shares the tensor's version counter; replacing the alias's data does not change the counter.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._saved = tensor._version
        self._alias = alias = tensor.detach()
        nothing = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if isinstance(alias, DTensor):
            alias._local_tensor = nothing
        else:
            alias.data = nothing

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified since."""
        check_version(self._saved, self._alias)


def check_version(saved: int, tensor: torch.Tensor) -> None:
    """Raise RuntimeError, as autograd does without hooks, if ``tensor`` is no longer at version ``saved``."""
    if tensor._version != saved:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: it "
            f"was saved at version {saved} and is at version {tensor._version}. Use the out-of-place form of the "
            f"operation that changes a checkpointed layer's input."
        )


class Kept:
    """A saved tensor that is not offloaded."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = tensor._version

    def get(self) -> torch.Tensor:
        check_version(self._version, self.tensor)
        return self.tensor


@dataclass(eq=False)
class Record:
    """A saved tensor on the host. Lives as long as a graph holds a :class:`Handle` of it; then its buffer is free."""

    mover: Mover
    layout: Layout
    buffer: torch.Tensor
    storage: StorageWeakRef  # of the saved tensor; keeps the storage's identity (not its memory) from being used again
    watch: VersionWatch
    stored: Any = None  # the transfer to the host
    loaded: torch.Tensor | None = None  # the copy on the device
    loading: Any = None  # the transfer that brings it
    groups: list = field(default_factory=list)  # weak references to the groups that saved it

    def load(self) -> bool:
        """Start to load the tensor; returns False if it is loaded or a load is pending."""
        if self.loaded is not None:
            return False
        target = self.layout.empty()
        host, part = self.layout.on_host(self.buffer), self.layout.moving_part(target)
        self.loading = self.mover.load(host, part, self.stored)
        self.loaded = target
        return True

    def get(self) -> torch.Tensor:
        """Returns the loaded tensor, ordered before later operations of the computation."""
        self.watch.check()
        assert self.loaded is not None
        self.mover.wait(self.loading)
        return self.loaded

    def evict(self) -> None:
        """Drop the device copy; keep the host copy."""
        if self.loaded is not None:
            self.mover.wait(self.loading)  # the memory may be used again by what is computed next
            self.loaded = None

    def __del__(self) -> None:
        if self.loaded is not None and not self.mover.done(self.loading):
            self.mover.part_with(self.loaded)  # loaded but unused; any thread may release it
        self.mover.pool.give(self.buffer, self.loading if self.loading is not None else self.stored)


class Group:
    """The tensors saved by one checkpointed layer in one forward."""

    def __init__(self, owner: Any, index: int) -> None:
        self.owner = owner
        self.index = index
        self.resident = False
        self._records: list[weakref.ref] = []

    def add(self, record: Record) -> None:
        self._records.append(weakref.ref(record))
        record.groups.append(weakref.ref(self))

    def records(self) -> list[Record]:
        """Those that a graph still holds."""
        return [r for ref in self._records if (r := ref()) is not None]


@dataclass(frozen=True, slots=True)
class Handle:
    """Autograd's substitute for an offloaded tensor. ``rebuild`` restores the saved type from the plain tensor."""

    record: Record
    group: Group
    rebuild: Any = None
