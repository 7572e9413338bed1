"""Checks of all parts of `torch.distributed.batch_isend_irecv` before the first part starts."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed import distributed_c10d as dist_c10d

from smddp.torch.collectives.p2p import Messages
from smddp.torch.compat import warn_missing

#: torch's check, called with the parts of each batch.
_CHECK = "_check_p2p_op_list"


def check_batches(kind: type[Messages]) -> None:
    """Makes torch check batches of groups of class `kind` with their `check_message`. Idempotent."""
    check = getattr(dist_c10d, _CHECK, None)
    if check is None:
        warn_missing(f"distributed_c10d.{_CHECK}", "a batch with an invalid part starts the parts before it")
    elif not hasattr(check, "__wrapped__"):

        @functools.wraps(check)
        def check_all(parts: list[Any]) -> None:
            check(parts)
            for part in parts:
                if isinstance(part.group, kind):
                    receives = part.op is dist_c10d.irecv
                    part.group.check_message(receives, part.tensor, part.group_peer, part.tag)

        setattr(dist_c10d, _CHECK, check_all)
