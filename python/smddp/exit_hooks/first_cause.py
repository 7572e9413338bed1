"""Under torchrun, a rank that fails because another one did leaves room for that one to be seen first.

torchrun takes the failure with the earliest time for the root cause. Times are in whole seconds; what ends without an
error file, such as a killed process, has the time at which the agent saw it, up to a tenth of a second later. The other
ranks learn of a death within milliseconds, so their errors would be as early, or earlier. So a process that was told of
a peer's end is late where torchrun looks, and there alone: when `@record` writes its error file and when it exits. Code
that handles the error never waits.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

from smddp._native import core

# Seconds from the notice on. The agent looks ten times a second (torchrun --monitor-interval) and ends the others then,
# so nobody waits that long where the first cause is a process of the same agent.
_LATE = 2.0

_noticed: float | None = None


def noticed() -> None:
    """This process was told that a peer has ended."""
    global _noticed
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _noticed = time.monotonic()
        _record_late()


def overcome() -> None:
    """The group went on without that peer: what comes next has causes of its own."""
    global _noticed
    _noticed = None


def give_way() -> None:
    """Wait until a peer's end, if this process was told of one, is old enough to be seen first."""
    if _noticed is not None and (left := _noticed + _LATE - time.monotonic()) > 0:
        time.sleep(left)


def _record_late() -> None:
    """Have `@record`, where the program uses it, write the error file of such an error late. Idempotent."""
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
            give_way()
        record(self, e)

    module.ErrorHandler.record_exception = record_exception


def follows(error: BaseException | None, cause: type[BaseException]) -> bool:
    """Whether an error is a ``cause``, or was raised from one or while one was handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, cause):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
