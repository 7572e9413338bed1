"""torch.distributed with smddp as its default backend, for scripts older than the backend name."""

import os as _os
from typing import Any as _Any

import torch.distributed as _dist
from smdistributed.dataparallel.torch import torch_smddp as _torch_smddp  # noqa: F401  registers the backend
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_initialized,
)


def init_process_group(*args: _Any, **kwargs: _Any) -> None:
    """torch's init_process_group; the backend is smddp where the caller names none."""
    if not args and kwargs.get("backend") is None:
        kwargs["backend"] = "smddp"
    _dist.init_process_group(*args, **kwargs)


def get_local_rank() -> int:
    """This process's rank on its machine, as the launcher set it.

    Raises RuntimeError where no launcher did.
    """
    for name in ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        value = _os.environ.get(name)
        if value:
            return int(value)
    raise RuntimeError("the local rank is unknown: start this script with torchrun, or set LOCAL_RANK")


__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
]
