"""Conversion of tensors to the core's arguments (address and element count), and checks of tensors.

The core reads and writes contiguous memory. Strided, conjugated and negated tensors are copied before and after a call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

import torch
from torch import Tensor

from smddp.torch.compat import internal_overlap, without_transforms

Block = tuple[int, int]
# Larger than any storage, in bytes.
_LOW = 1 << 40
Item = TypeVar("Item")


class NoMemoryError(ValueError):
    """Raised for a tensor that has elements but no memory."""


def is_plain(tensor: Tensor) -> bool:
    """Returns whether memory holds the elements contiguously and unchanged."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def readable(tensor: Tensor) -> Tensor:
    """Returns a plain tensor unchanged, and a contiguous copy of any other."""
    if is_plain(tensor):
        return tensor
    # On a device, a copy from missing memory would destroy the process's context.
    block(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def block(tensor: Tensor) -> Block:
    """Returns (address, elements) of a plain tensor. Raises NoMemoryError for wrappers and tensors without memory."""
    count = tensor.numel()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise NoMemoryError(
            f"a tensor of {describe(tensor)} has no memory ({error}). Inside a torch.func transform use the "
            "calls that take single tensors, such as all_gather_into_tensor: torch does not unwrap lists of lists"
        ) from None
    # A view into freed memory reports its offset as address, which is low but not 0.
    if address < _LOW and count and address == tensor.storage_offset() * tensor.element_size():
        raise NoMemoryError(
            f"a tensor of {describe(tensor)} has no memory: its storage was resized to nothing, as FSDP does with "
            "parameters that are not gathered, or it never had any"
        )
    return address, count


def check_memory(*tensors: Tensor) -> None:
    """Raises NoMemoryError for a tensor without memory, before the first part of a coalesced call starts."""
    for tensor in tensors:
        block(tensor)


def cut(tensor: Tensor, counts: list[int]) -> tuple[int, list[int]]:
    """Returns (address, elements of each block) of a plain tensor. Raises NoMemoryError as `block`."""
    return block(tensor)[0], counts


class CopyBack:
    """Copies results from a contiguous buffer to the caller's tensor after the call."""

    __slots__ = ("_buffer", "_tensor")

    def __init__(self, tensor: Tensor, buffer: Tensor) -> None:
        self._tensor = tensor
        self._buffer = buffer

    def __call__(self) -> None:
        # May run on a helper thread, where grad mode is on. Inference tensors are writable in inference mode only.
        # May also run in a wait inside a torch.func transform; the tensors are already unwrapped.
        with torch.inference_mode(self._tensor.is_inference()), torch.no_grad(), without_transforms():
            self._tensor.detach().copy_(self._buffer)


def check_writable(tensor: Tensor) -> None:
    """Raises ValueError for a tensor whose elements share memory."""
    # 1: certain overlap (an expanded tensor). Partial overlaps are too expensive to detect.
    if not tensor.is_contiguous() and internal_overlap(tensor) == 1:
        raise ValueError(
            f"the output of shape {tuple(tensor.shape)} and strides {tensor.stride()} has several elements in one place"
        )


def check_apart(what: str, parts: Sequence[tuple[Sequence[Tensor], Tensor | None]]) -> None:
    """Raises ValueError if outputs overlap, or if the input of one part overlaps an output of another.

    parts: the outputs and the input of each part of one call. Exact for contiguous tensors; for other tensors only a
    shared first element is detected.
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
    """Returns first address and end of a tensor with elements; only the first element if it is not plain."""
    start = tensor.data_ptr()
    return start, start + (tensor.numel() if is_plain(tensor) else 1) * tensor.element_size()


def _entry(at: tuple[int, ...], parts: Sequence[tuple[Sequence[Tensor], Tensor | None]]) -> str:
    part, index = at
    if len(parts) == 1:
        return f"output {index}"
    return f"output {part}" if len(parts[part][0]) == 1 else f"output {part} of rank {index}"


def target_buffer(tensor: Tensor, after: list[Callable[[], None]], *, keep_values: bool = False) -> Tensor:
    """Returns the contiguous buffer that receives the result: `tensor`, or a new one with a CopyBack in `after`.

    keep_values: the buffer starts as a copy of the tensor (in-place calls).
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
    """Returns shape and dtype, for messages."""
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def one(tensors: Sequence[Item], what: str) -> Item:
    """Returns the only entry of a list. Raises ValueError for another length."""
    if len(tensors) != 1:
        raise ValueError(f"{what}: one tensor a call is needed, got {len(tensors)}")
    return tensors[0]


def check_dtype(what: str, first: Tensor, others: Sequence[Tensor]) -> None:
    """Raises TypeError unless all tensors have the same dtype."""
    dtype = first.dtype
    for index, other in enumerate(others):
        if other.dtype != dtype:
            raise TypeError(f"{what}: all tensors must have one dtype, got {dtype} and {other.dtype} (tensor {index})")


def check_length(what: str, tensors: Sequence[object], size: int) -> None:
    """Raises ValueError unless the list has one entry for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what} must have one entry for each of the {size} ranks, got {len(tensors)}")


def split_counts(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int] | None:
    """Returns the elements for each rank of a tensor split along its first dimension; None: equal parts.

    Raises ValueError if the split sizes do not fit.
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
