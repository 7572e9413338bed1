"""Shutdown of smddp groups in destroy_process_group of torch 2.5, which shuts down only NCCL groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as dist_c10d

#: The function that torch 2.5 calls for each destroyed group.
_ENDS = "_shutdown_backend"


def patch_shutdown(kind: type) -> None:
    """Makes destroy_process_group shut down groups of class `kind`. Idempotent."""
    ends = getattr(dist_c10d, _ENDS, None)
    if ends is not None and not hasattr(ProcessGroup, "shutdown") and not hasattr(ends, "__wrapped__"):
        setattr(dist_c10d, _ENDS, _with_ours(ends, kind))


def _with_ours(ends: Callable[[Any], None], kind: type) -> Callable[[Any], None]:
    @functools.wraps(ends)
    def end(group: Any) -> None:
        if isinstance(group, kind):
            group.shutdown()  # type: ignore[attr-defined]
        else:
            ends(group)

    return end
