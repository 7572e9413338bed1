"""`smddp.empty`: tensors in symmetric memory, which all ranks of a host map and read directly."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from smddp._native import core

if TYPE_CHECKING:
    from torch import Tensor


def memory(nbytes: int) -> Any:
    """Returns a writable buffer of `nbytes` bytes of symmetric memory. It is freed with its last reference.

    Raises MemoryError if no contiguous block of this size is free.
    """
    owner = core().SymmetricBuffer(nbytes)
    buffer: Any = (ctypes.c_char * nbytes).from_address(owner.address)
    # Each view of the buffer holds a reference to the memory.
    buffer.owner = owner
    return buffer


def empty(*size: Any, dtype: Any = None) -> Any:
    """Returns an uninitialized CPU tensor in symmetric memory, which the other ranks of its host read directly.

    Collectives that send from it, or that send on a result made in it, skip the copy into staging memory for messages
    of 16 KiB or more per rank. It works like any other tensor, with any backend; a forked child shares its memory with
    the parent. `smddp info` shows the symmetric memory of a process and the number of messages read in place.

    Args:
        *size: Shape in elements, as of torch.empty.
        dtype: Element type. A numpy dtype (or its name) gives a numpy array, for groups without torch.

    Raises:
        MemoryError: No contiguous block is free. The limit is 16 GiB per process.
        ValueError: A size is negative.
        TypeError: The dtype is invalid.

    Example:
        >>> shard = smddp.empty(1 << 20, dtype=torch.bfloat16)
        >>> dist.all_gather_into_tensor(whole, shard)
    """
    shape = tuple(size[0]) if len(size) == 1 and not hasattr(size[0], "__index__") else size
    shape = tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"a tensor of size {shape}: no extent may be negative")
    if dtype is None or type(dtype).__module__ == "torch":
        return tensor(shape, dtype)
    return _array(shape, dtype)


def tensor(shape: tuple[int, ...], dtype: Any = None) -> Tensor:
    """Returns a tensor of a torch dtype. See `empty`."""
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
