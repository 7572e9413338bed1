"""Delay of secondary failures, so that torchrun reports the first failed rank as the root cause.

torchrun selects the failure with the earliest time, in whole seconds. For a killed process without an error file it
uses the time of the agent's poll, up to 0.1 s late. The other ranks detect a death within milliseconds, so their errors
would be as early. Therefore a process with a failed peer delays its `@record` error file and its exit. Code that
handles the error does not wait.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from smddp._native import core

# Seconds after the peer's failure. The agent polls ten times a second (torchrun --monitor-interval) and then ends the
# others, so the full delay applies only to failures on another host.
_LATE = 2.0

_failed_at: float | None = None


def record_peer_failure() -> None:
    """Records that a peer has failed."""
    global _failed_at
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _failed_at = time.monotonic()
        _record_late()


def clear() -> None:
    """Clears the record, after the group has continued without the failed peer."""
    global _failed_at
    _failed_at = None


def delay_exit() -> None:
    """Waits until torchrun has detected the failure of the recorded peer, if any."""
    if _failed_at is not None and (left := _failed_at + _LATE - time.monotonic()) > 0:
        time.sleep(left)


def _record_late() -> None:
    """Delays the error file of `@record` for a peer's failure, if the program uses `@record`. Idempotent."""
    module = sys.modules.get("torch.distributed.elastic.multiprocessing.errors.error_handler")
    if module is None or hasattr(module.ErrorHandler.record_exception, "__wrapped__"):
        return
    record = module.ErrorHandler.record_exception

    @functools.wraps(record)
    def record_exception(self: Any, e: BaseException) -> None:
        if follows(e, core().PeerLostError):
            # torchrun may end this process before Python prints it.
            sys.stderr.write(f"smddp: rank {os.environ.get('RANK', '?')}: {type(e).__name__}: {e}\n")
            sys.stderr.flush()
            delay_exit()
        record(self, e)

    module.ErrorHandler.record_exception = record_exception


def follows(error: BaseException | None, cause: type[BaseException]) -> bool:
    """Returns True if an error is a ``cause``, or was raised from one or while one was handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, cause):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
