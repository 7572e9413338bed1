"""In a torch that tells only NCCL of the end of a group (2.5), destroy_process_group shuts groups of ours down, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as dist_c10d

#: What such a torch calls for each group that it destroys.
_ENDS = "_shutdown_backend"


def hear_of_ends(kind: type) -> None:
    """See to it that groups of that kind are shut down when they are destroyed. Idempotent."""
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
