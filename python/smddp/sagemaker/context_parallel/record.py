"""Record of the most recent parts of `get_batch_for_cp_rank`.

Ranks that hold equal tokens hold either parts of text that repeats itself, or the whole batch each. The tokens do not
distinguish the two cases; the record does.
"""

from __future__ import annotations

from collections import deque

import torch

from smddp.sagemaker.checksum import checksum

# Tensors, several to a batch: enough for loaders that prepare batches ahead.
_LATEST = 256
# (shape, ranks of the context group, checksum on the tensor's device)
_cut: deque[tuple[torch.Size, int, torch.Tensor]] = deque(maxlen=_LATEST)


def contents(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum that does not depend on the type of integers."""
    return checksum(tensor if tensor.is_floating_point() else tensor.long())


def remember(part: torch.Tensor, ranks: int) -> None:
    """Records ``part``, this process's part of a batch cut among ``ranks`` ranks."""
    _cut.append((part.shape, ranks, contents(part)))


def was_cut(tensor: torch.Tensor, ranks: int) -> bool:
    """True if `remember` recorded a tensor of this shape and these contents."""
    alike = [sum_ for shape, among, sum_ in _cut if shape == tensor.shape and among == ranks]
    wanted = contents(tensor).cpu()
    return any(bool(sum_.cpu() == wanted) for sum_ in alike)
