"""Contributions of each rank, and expected results computed without communication."""

from __future__ import annotations

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
REDUCING = [*FLOATS, *SIGNED, *UNSIGNED, torch.bool, *COMPLEX]
MOVING = [
    *REDUCING,
    torch.complex32,
    *(
        getattr(torch, name)
        for name in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        )
        if hasattr(torch, name)
    ),
]


def contribution(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Returns the flat tensor of a rank, computable on every rank; small numbers keep sums exact."""
    numbers = (torch.arange(count) * 7 + rank * 3 + salt) % 5 + 1
    if dtype == torch.bool:
        return numbers % 2 == 0
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers * 2).double()).to(dtype)
    if dtype in REDUCING:
        return numbers.to(dtype)
    return numbers.to(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Asserts that shape, type and bits are equal."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    raw_got, raw_wanted = (t.detach().contiguous().flatten().view(torch.uint8) for t in (got, wanted))
    assert torch.equal(raw_got, raw_wanted), f"got {got}\nwanted {wanted}"


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Returns the inputs reduced by torch.distributed's ReduceOp `op`."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        numbers = [t.to(torch.int64) for t in inputs]
    elif dtype.is_floating_point or dtype.is_complex:
        numbers = [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in inputs]
    else:
        numbers = [t.to(torch.int64) for t in inputs]
    total = numbers[0]
    for other in numbers[1:]:
        total = {
            "SUM": lambda a, b: a + b,
            "AVG": lambda a, b: a + b,
            "PRODUCT": lambda a, b: a * b,
            "MIN": lambda a, b: torch.minimum(a, b),
            "MAX": lambda a, b: torch.maximum(a, b),
            "BAND": lambda a, b: a & b,
            "BOR": lambda a, b: a | b,
            "BXOR": lambda a, b: a ^ b,
        }[op](total, other)
    if op == "AVG":
        exact = dtype.is_floating_point or dtype.is_complex
        total = total / len(inputs) if exact else torch.div(total, len(inputs), rounding_mode="trunc")
    return total != 0 if dtype == torch.bool else total.to(dtype)
