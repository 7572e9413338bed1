"""What an element becomes that crosses nodes in a format (`SMDDP_WIRE_FORMAT`): the core's rounding in torch.

The same bits as those that arrive. Rounding again what was rounded changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that have a scale in common in int8.
GROUP = 256
# Groups whose largest element is smaller are zeros.
_SMALLEST = 2.0**-100
# Rows of GROUP that are rounded at a time: what is made of them on the way stays in the second-level cache.
_AT_A_TIME = 256


def rounded(rows: Tensor, format: str) -> Tensor:
    """What arrives of `rows` (n, GROUP), float32, each row a group of `format`: bf16, f16 or int8."""
    if format == "bf16":
        return rows.bfloat16().float()
    if format == "f16":
        return rows.half().float()
    return _whole_numbers(rows)


def round_off(rows: Tensor, format: str) -> Tensor:
    """Leaves in `rows` what arrives of them, and returns what was rounded away: rows == arrived + rounded away.

    What is not finite was rounded by nobody: nothing is kept of it, nor of its group in int8.
    """
    away = torch.empty_like(rows)
    for part, left in zip(rows.split(_AT_A_TIME), away.split(_AT_A_TIME), strict=True):
        arrived = rounded(part, format)
        torch.sub(part, arrived, out=left)
        part.copy_(arrived)
    if not torch.isfinite(away.sum()):
        away.nan_to_num_(0.0, 0.0, 0.0)
    return away


def _whole_numbers(rows: Tensor) -> Tensor:
    """Numbers from -127 to 127 times a scale that has 16 bits of precision and is rounded up, a row at a time."""
    most = rows.abs().amax(1, keepdim=True)
    exact = (most / 127.0).view(torch.int32)
    above, below = (bits.view(torch.float32) for bits in ((exact + 0xFF) & ~0xFF, exact & ~0xFF))
    scale = torch.where((above * 127.0).isfinite(), above, below)
    inverse = 1.0 / scale
    small, wild = most < _SMALLEST, ~most.isfinite()
    scale.masked_fill_(small, 0.0).masked_fill_(wild, torch.nan)
    inverse.masked_fill_(small | wild, 0.0)
    # A zero is a positive one, as it is of whole numbers.
    return torch.mul(rows, inverse).round_().mul_(scale).add_(0.0)
