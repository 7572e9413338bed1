"""DTensor's change of the sharded dimension with torch before 2.7, on the CPU and CUDA.

There the C++ operation `_dtensor::shard_dim_alltoall` cannot call the method of a Python group. It would call torch's
placeholder for our backend, which leaves the result unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as dist_c10d

from smddp.torch.retained_handles import RETAIN_HANDLES

_library: Any = None


def install() -> None:
    """Reimplements the operation in Python for an old torch, for groups of every backend. Idempotent."""
    global _library
    if not RETAIN_HANDLES or _library is not None or not hasattr(torch.ops._dtensor, "shard_dim_alltoall"):
        return
    _library = torch.library.Library("_dtensor", "IMPL")
    for device in ("CPU", "CUDA"):
        _library.impl("shard_dim_alltoall", _shard_dim_alltoall, device)


def _shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, group_name: Any) -> Tensor:
    group = dist_c10d._resolve_process_group(group_name)
    width = input.shape[shard_dim] // group.size()
    inputs = [input.narrow(shard_dim, rank * width, width).contiguous() for rank in range(group.size())]
    outputs = [torch.empty_like(part) for part in inputs]
    group.alltoall(outputs, inputs).wait()
    return torch.cat(outputs, gather_dim)
