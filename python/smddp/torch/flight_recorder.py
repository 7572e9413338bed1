"""The dump of torch's flight recorder when a group fails, for `torchfrtrace`.

torch's own backends write the dump when they fail. torch has no such notification for a backend in Python.
"""

from __future__ import annotations

import os
import sys

from smddp._constants import NAME
from smddp.torch.compat import dump_flight_recorder

_OFF = ("0", "n", "no", "f", "false", "off")

# This process's global rank, once a recorder is attached.
_rank: int | None = None
# Only the first failure, the cause, is dumped; a later dump would overwrite it.
_dumped = False


def recording(rank: int) -> None:
    """Enables the dump, once a recorder is attached to a group. rank: global rank of this process."""
    global _rank
    _rank = rank


def failed() -> None:
    """Writes the dump of a failed group to TORCH_FR_DUMP_TEMP_FILE plus the rank, once per process."""
    global _dumped
    if _rank is None or _dumped or not _wanted():
        return
    _dumped = True
    try:
        dump_flight_recorder(_rank, NAME)
    except Exception as error:
        # Not raised: the caller receives the failure itself.
        sys.stderr.write(f"smddp: rank {_rank}: cannot write the dump of torch's flight recorder: {error}\n")


def _wanted() -> bool:
    """Returns whether the dump is enabled, as in torch: the first set variable counts, and the default is on."""
    for name in ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        if value := os.environ.get(name):
            return value.lower() not in _OFF
    return True
