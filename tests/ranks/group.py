"""The default group of ranks over a file store."""

from __future__ import annotations

import datetime
import os
import tempfile
from typing import Any

BACKEND = os.environ.get("SMDDP_TEST_BACKEND", "smddp")
# Timeout of the groups; below the limit of a case, so that the group's error is reported.
GROUP_SECONDS = 40.0


def init(store: str, rank: int, size: int, **options: Any) -> None:
    """Creates the default group over a file store."""
    import torch.distributed as dist
    from smddp._register import register

    register()
    options.setdefault("backend", BACKEND)
    options.setdefault("timeout", datetime.timedelta(seconds=GROUP_SECONDS))
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=size, **options)


def again(**options: Any) -> None:
    """Destroys the default group and creates it again with `options`."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    name: list[Any] = [tempfile.mktemp(prefix="smddp-store-")]
    dist.broadcast_object_list(name, src=0)
    dist.destroy_process_group()
    init(name[0], rank, size, **options)
