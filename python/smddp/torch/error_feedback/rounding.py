"""The core's rounding of wire formats (`SMDDP_WIRE_FORMAT`) in torch.

Bit-identical to the received values, and idempotent.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that share a scale in int8.
GROUP = 256
# Groups whose largest element is smaller become zeros.
_SMALLEST = 2.0**-100
# Rows of GROUP that are rounded at a time: intermediate values fit into the second-level cache.
_AT_A_TIME = 256


def rounded(rows: Tensor, format: str) -> Tensor:
    """Returns `rows` (n, GROUP), float32, as received in `format` (bf16, f16 or int8); each row is a group."""
    if format == "bf16":
        return rows.bfloat16().float()
    if format == "f16":
        return rows.half().float()
    return _int8(rows)


def round_off(rows: Tensor, format: str) -> Tensor:
    """Rounds `rows` in place. Returns the rounding error: rows == rounded + error.

    The error is zero for values that are not finite, and for their group in int8.
    """
    away = torch.empty_like(rows)
    for part, left in zip(rows.split(_AT_A_TIME), away.split(_AT_A_TIME), strict=True):
        arrived = rounded(part, format)
        torch.sub(part, arrived, out=left)
        part.copy_(arrived)
    if not torch.isfinite(away.sum()):
        away.nan_to_num_(0.0, 0.0, 0.0)
    return away


def _int8(rows: Tensor) -> Tensor:
    """Returns integers from -127 to 127 times a scale, by row. The scale has 16 bits and is rounded up."""
    most = rows.abs().amax(1, keepdim=True)
    exact = (most / 127.0).view(torch.int32)
    above, below = (bits.view(torch.float32) for bits in ((exact + 0xFF) & ~0xFF, exact & ~0xFF))
    scale = torch.where((above * 127.0).isfinite(), above, below)
    inverse = 1.0 / scale
    small, wild = most < _SMALLEST, ~most.isfinite()
    scale.masked_fill_(small, 0.0).masked_fill_(wild, torch.nan)
    inverse.masked_fill_(small | wild, 0.0)
    # Only positive zeros, as of integers.
    return torch.mul(rows, inverse).round_().mul_(scale).add_(0.0)
