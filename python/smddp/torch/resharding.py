"""DTensor's way from one sharded dimension to another on CUDA, for a torch whose C++ cannot ask the group for it.

There, `_dtensor::shard_dim_alltoall` calls a method of the group that no group written in Python is asked for: torch's
stand-in for our backend would answer, and leave the result as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as dist_c10d

from smddp.torch.retained_handles import NEEDED

_library: Any = None


def install() -> None:
    """Have the operation of an old torch call groups from Python. Idempotent; serves the groups of every backend."""
    global _library
    if not NEEDED or _library is not None or not hasattr(torch.ops._dtensor, "shard_dim_alltoall"):
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
