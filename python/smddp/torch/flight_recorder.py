"""The dump of torch's flight recorder when a group fails, for `torchfrtrace`.

torch's own backends write theirs when they give up. For a backend in Python torch has no way to be told of that.
"""

from __future__ import annotations

import os
import sys

from torch._C import _distributed_c10d as c10d

from smddp._constants import NAME

_OFF = ("0", "n", "no", "f", "false", "off")

# This process's global rank, once a recorder is attached.
_rank: int | None = None
# The first failure is the cause, and later ones would write over it.
_dumped = False


def recording(rank: int) -> None:
    """A recorder listens to a group of this process, whose global rank is `rank`."""
    global _rank
    _rank = rank


def failed() -> None:
    """A group has failed: write what was recorded to TORCH_FR_DUMP_TEMP_FILE with the rank's number, once a process."""
    global _dumped
    if _rank is None or _dumped or not _wanted():
        return
    _dumped = True
    try:
        c10d._dump_fr_trace_file(_rank, backend=NAME)
    except Exception as error:
        # The failure itself is on its way to the caller.
        sys.stderr.write(f"smddp: rank {_rank}: torch's flight recorder could not be dumped: {error}\n")


def _wanted() -> bool:
    """As torch has it: the first of these names that is set counts, and on is the default."""
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        if value := os.environ.get(name):
            return value.lower() not in _OFF
    return True
