"""`smddp.empty`: tensors in memory that all ranks of a host map, and from which they take what is sent."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from smddp._native import core

if TYPE_CHECKING:
    from torch import Tensor


def memory(nbytes: int) -> Any:
    """A writable buffer of `nbytes` bytes of symmetric memory, free again when nothing refers to it any more.

    Raises MemoryError where so much of it is not free in one piece.
    """
    owner = core().SymmetricBuffer(nbytes)
    buffer: Any = (ctypes.c_char * nbytes).from_address(owner.address)
    # Each view of the buffer holds a reference to it, and so to the memory.
    buffer.owner = owner
    return buffer


def empty(*size: Any, dtype: Any = None) -> Any:
    """A tensor on the CPU whose memory the other ranks of its host read where it lies.

    As torch.empty(*size, dtype=dtype), but for where it is: collectives that send from it, or whose result is made in
    it and sent on, copy nothing into staging memory, if what goes to a rank is 16 KiB or more. Elements are anything
    at first. With a numpy dtype (or its name) it is an array, for groups without torch. It may be used as any other,
    with any backend; a forked child has its memory in common with its parent.

        shard = smddp.empty(1 << 20, dtype=torch.bfloat16)
        dist.all_gather_into_tensor(whole, shard)

    `smddp info` shows how much of it a process has, and how many messages were read where they lay.

    Raises MemoryError where so much is not free in one piece (a process has 16 GiB of room for it), ValueError for a
    negative size, TypeError for a type that is none.
    """
    shape = tuple(size[0]) if len(size) == 1 and not hasattr(size[0], "__index__") else size
    shape = tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"a tensor of size {shape}: no extent may be negative")
    if dtype is None or type(dtype).__module__ == "torch":
        return tensor(shape, dtype)
    return _array(shape, dtype)


def tensor(shape: tuple[int, ...], dtype: Any = None) -> Tensor:
    """The same with torch's type."""
    import torch

    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or a numpy type, and is {dtype!r}")
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    bytes_ = torch.frombuffer(memory(count * dtype.itemsize), dtype=torch.uint8)
    return bytes_.view(dtype).view(shape)


def _array(shape: tuple[int, ...], dtype: Any) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {dtype!r} holds Python objects, which other processes cannot read")
    count = math.prod(shape)
    if count == 0:
        return numpy.empty(shape, kind)
    return numpy.frombuffer(memory(count * kind.itemsize), dtype=kind).reshape(shape)
