"""Numbers of torch's dtypes and reductions in the native core."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from smddp._constants import DTYPES

# Types that the core sends as bytes, by bytes of one element.
_OPAQUE = {1: 15, 2: 16, 4: 17, 8: 18, 16: 19}
_MOVES_ONLY = frozenset({*_OPAQUE.values(), 20})

_BOOL = 12
_FLOATS = frozenset({0, 1, 2, 3})
_COMPLEX = frozenset({13, 14, 20})

SUM, AVG, PREMUL_SUM, MIN, MAX, PROD, BAND, BOR, BXOR = range(9)
_REDOP_NAMES = ("SUM", "AVG", "PREMUL_SUM", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
# By the value of torch's enumeration, whose members are slow to hash.
_NUMBERS: dict[int, int] = {getattr(ReduceOp, name).value: number for number, name in enumerate(_REDOP_NAMES)}


def _code(dtype: torch.dtype) -> int | None:
    name = str(dtype).removeprefix("torch.")
    return DTYPES.get(name, _OPAQUE.get(dtype.itemsize))


CODES: dict[torch.dtype, int] = {
    dtype: code
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    if (code := _code(dtype)) is not None
}


def code_of(dtype: torch.dtype) -> int:
    """Returns the core's number of `dtype`. Raises TypeError unless an element has 1, 2, 4, 8 or 16 bytes."""
    code = CODES.get(dtype)
    if code is None:
        code = _code(dtype)
        if code is None:
            raise TypeError(f"smddp cannot move {dtype}: its element takes {dtype.itemsize} bytes")
        CODES[dtype] = code
    return code


def _allowed(number: int) -> frozenset[int]:
    every = frozenset(DTYPES.values()) - _MOVES_ONLY
    if number >= BAND:
        return every - _FLOATS - _COMPLEX
    if number in (MIN, MAX):
        return every - _COMPLEX
    return every - {_BOOL} if number in (AVG, PREMUL_SUM) else every


_ALLOWED = tuple(_allowed(number) for number in range(len(_REDOP_NAMES)))
_WITHOUT_FACTOR = tuple((number, 1.0) for number in range(len(_REDOP_NAMES)))


def reduction(redop: Any, dtype: torch.dtype, code: int) -> tuple[int, float]:
    """Returns (number, factor) of a torch ReduceOp on elements of `dtype`; only PREMUL_SUM uses the factor.

    Raises TypeError or ValueError if the type does not support the reduction.
    """
    kind = redop.op if isinstance(redop, ReduceOp) else redop
    number = _NUMBERS.get(kind.value)
    if number is None:
        raise ValueError(f"smddp does not know the reduction {kind}")
    if code not in _ALLOWED[number]:
        raise _refusal(number, dtype, code)
    return (number, _factor(redop)) if number == PREMUL_SUM else _WITHOUT_FACTOR[number]


def _refusal(number: int, dtype: torch.dtype, code: int) -> Exception:
    name = f"ReduceOp.{_REDOP_NAMES[number]}"
    if code in _MOVES_ONLY:
        return TypeError(
            f"Cannot use {name} with {dtype}: smddp moves this type but does not reduce it. "
            "Reduce a copy in float32 or bfloat16, or exchange the data with all_gather or all_to_all."
        )
    if number >= BAND:
        return ValueError(f"Cannot use {name} with non-integral dtype {dtype}")
    return ValueError(f"Cannot use {name} with {'complex ' if code in _COMPLEX else ''}dtype {dtype}")


def _factor(redop: Any) -> float:
    # Only the pickled state of ReduceOp exposes the factor in every torch.
    factor: Any = redop.__getstate__()[1] if isinstance(redop, ReduceOp) else None  # type: ignore[index]
    if factor is None:
        raise ValueError("ReduceOp.PREMUL_SUM needs its factor: torch.distributed._make_nccl_premul_sum(factor)")
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ValueError(f"the factor of PREMUL_SUM must have one element, it has {factor.numel()}")
        factor = factor.item()
    return float(factor)
