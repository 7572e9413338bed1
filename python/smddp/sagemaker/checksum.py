"""Checksums of tensors, exact on every device: integer arithmetic on the bits of the elements."""

from __future__ import annotations

import torch

# Largest checksum; the smallest is 0, so that `LIMIT - checksum` does not overflow.
LIMIT = 2**62 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_ROW = 1024
# Longer tensors are summed in rows first, which needs no temporary tensor of their size.
_WEIGHTED = 64 * _ROW
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # an odd number without a pattern in its bits


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of the elements and their positions: int64 scalar on the tensor's device.

    Up to 65,536 elements every place counts, beyond that every row of 1,024.
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    if bits.numel() > _WEIGHTED:
        rows = bits[: bits.numel() // _ROW * _ROW].view(-1, _ROW).sum(1, dtype=torch.int64)
        bits = torch.cat([rows, bits[rows.numel() * _ROW :].sum(0, keepdim=True, dtype=torch.int64)])
    weights = torch.arange(1, bits.numel() + 1, device=bits.device) * _FACTOR
    mixed = (bits.long() * weights).sum()
    return (mixed ^ (mixed >> 31)) & LIMIT
