"""From tensors to what the core wants: addresses and element counts, and back.

The core reads and writes plain memory. A tensor that is not one row of elements in order (strided,
conjugated, negated) is read through a copy and written through one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from smddp.torch.compat import without_transforms

Block = tuple[int, int]
# No storage is as large as this.
_LOW = 1 << 40
Item = TypeVar("Item")


class NoMemoryError(ValueError):
    """A tensor that has elements, but nowhere in memory."""


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in memory in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a plain copy."""
    if is_plain(tensor):
        return tensor
    # On a device, a copy of what is not there would end the process's context.
    block(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def block(tensor: Tensor) -> Block:
    """(address, elements) of a plain tensor. Raises NoMemoryError for one without memory, and for wrappers."""
    count = tensor.numel()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise NoMemoryError(
            f"a tensor of {describe(tensor)} has no memory ({error}). Inside a torch.func transform use the "
            "calls that take single tensors, such as all_gather_into_tensor: torch does not unwrap lists of lists"
        ) from None
    # A view into memory that was given back says how far into it, so its address is low and not 0.
    if address < _LOW and count and address == tensor.storage_offset() * tensor.element_size():
        raise NoMemoryError(
            f"a tensor of {describe(tensor)} has no memory: its storage was resized to nothing, as FSDP does with "
            "parameters that are not gathered, or it never had any"
        )
    return address, count


def check_memory(*tensors: Tensor) -> None:
    """Raises NoMemoryError as `block`; for calls of several parts, before the first part moves."""
    for tensor in tensors:
        block(tensor)


def cut(tensor: Tensor, counts: list[int]) -> tuple[int, list[int]]:
    """(address, elements of each block) of a plain tensor. Raises NoMemoryError as `block`."""
    return block(tensor)[0], counts


class CopyBack:
    """Brings results from a plain buffer to the caller's tensor, when the call is done."""

    __slots__ = ("_buffer", "_tensor")

    def __init__(self, tensor: Tensor, buffer: Tensor) -> None:
        self._tensor = tensor
        self._buffer = buffer

    def __call__(self) -> None:
        # May run on a helper thread, where grad mode is on; and inference tensors only change in inference mode.
        # A wait inside a torch.func transform comes here too: these tensors are already unwrapped.
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad(), without_transforms():
            self._tensor.detach().copy_(self._buffer)


def check_writable(tensor: Tensor) -> None:
    """Raises ValueError for a tensor that has several elements in one place."""
    # 1: certainly overlapping (expanded); partial overlaps cannot be told cheaply.
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"the output of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements in one place"
        )


def check_apart(what: str, parts: Sequence[tuple[Sequence[Tensor], Tensor | None]]) -> None:
    """Raises ValueError where outputs share memory, or the input of one part shares memory with an output of another.

    parts: the outputs and the input of each part of one call. Exact for contiguous tensors; of other tensors only a
    shared first element is found.
    """
    spans = sorted(
        (*_span(output), part, index)
        for part, (outputs, _) in enumerate(parts)
        for index, output in enumerate(outputs)
        if output.numel()
    )
    for before, after in pairwise(spans):
        if after[0] < before[1]:
            first, second = sorted((before[2:], after[2:]))
            raise ValueError(
                f"{what}: {_entry(first, parts)} and {_entry(second, parts)} overlap in memory: give each output "
                "separate memory"
            )
    for part, (_, tensor) in enumerate(parts):
        if tensor is None or not tensor.numel() or len(parts) == 1:
            continue
        start, end = _span(tensor)
        # The outputs are disjoint, so their ends have the order of their starts.
        for at in range(bisect_right(spans, start, key=itemgetter(1)), len(spans)):
            if spans[at][0] >= end:
                break
            if spans[at][2] != part:
                raise ValueError(
                    f"{what}: input {part} and {_entry(spans[at][2:], parts)} overlap in memory: an input may overlap "
                    "its own outputs only; give it separate memory"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address and end of a tensor that has elements; only its first element counts where it is not plain."""
    start = tensor.data_ptr()
    return start, start + (tensor.numel() if is_plain(tensor) else 1) * tensor.element_size()


def _entry(at: tuple[int, ...], parts: Sequence[tuple[Sequence[Tensor], Tensor | None]]) -> str:
    part, index = at
    if len(parts) == 1:
        return f"output {index}"
    return f"output {part}" if len(parts[part][0]) == 1 else f"output {part} of rank {index}"


def landing(tensor: Tensor, after: list[Callable[[], None]], *, keep_values: bool = False) -> Tensor:
    """Where the core may write what is meant for `tensor`; a CopyBack is added to `after` if that is elsewhere.

    keep_values: the buffer starts as a copy of the tensor (calls that work in place).
    Raises ValueError as check_writable, and NoMemoryError as `block`.
    """
    if is_plain(tensor):
        return tensor
    check_writable(tensor)
    block(tensor)
    plain = tensor.detach()
    buffer = readable(plain) if keep_values else torch.empty_like(plain, memory_format=torch.contiguous_format)
    after.append(CopyBack(tensor, buffer))
    return buffer


def describe(tensor: Tensor) -> str:
    """Shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def one(tensors: Sequence[Item], what: str) -> Item:
    """The only entry of a list. Raises ValueError otherwise."""
    if len(tensors) != 1:
        raise ValueError(f"{what}: one tensor a call is needed, got {len(tensors)}")
    return tensors[0]


def check_dtype(what: str, first: Tensor, others: Sequence[Tensor]) -> None:
    """Raises TypeError unless all have the same dtype."""
    dtype = first.dtype
    for index, other in enumerate(others):
        if other.dtype != dtype:
            raise TypeError(f"{what}: all tensors must have one dtype, got {dtype} and {other.dtype} (tensor {index})")


def check_length(what: str, tensors: Sequence[object], size: int) -> None:
    """Raises ValueError unless there is one entry for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what} must have one entry for each of the {size} ranks, got {len(tensors)}")


def split_counts(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int] | None:
    """Elements for each rank of a tensor that is cut along its first dimension; None: all equal.

    Raises ValueError where the split sizes do not fit.
    """
    if tensor.dim() == 0:
        raise ValueError(f"{what}: a tensor without dimensions cannot be split between {size} ranks")
    rows = tensor.shape[0]
    if not splits:
        if rows % size:
            raise ValueError(
                f"{what}: Tensor's dim 0 does not divide equally across group size ({rows} rows, {size} ranks)"
            )
        return None
    if len(splits) != size:
        raise ValueError(f"{what}: Number of tensor splits not equal to group size ({len(splits)}, {size} ranks)")
    if any(split < 0 for split in splits):
        raise ValueError(f"{what}: split sizes must not be negative, got {list(splits)}")
    if sum(splits) != rows:
        raise ValueError(
            f"{what}: Split sizes doesn't match total dim 0 size ({list(splits)} sum to {sum(splits)}, not {rows})"
        )
    width = tensor.numel() // rows if rows else 0
    return [split * width for split in splits]
