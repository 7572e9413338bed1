"""Pending saves in start order."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref

import torch.distributed as dist

from smddp.sagemaker.distributed.checkpoint.participants import least
from smddp.sagemaker.distributed.checkpoint.strategy import PendingSave

__all__ = ["DEFAULT_ASYNC_REQUEST_QUEUE", "AsyncCallsQueue"]

_log = logging.getLogger(__name__)
_queues: weakref.WeakSet[AsyncCallsQueue] = weakref.WeakSet()
_NONE_LEFT = 2**62


class AsyncCallsQueue:
    """Saves that are being written, and their finalization in order."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, PendingSave]] = []
        self._begun = 0
        _queues.add(self)

    def add(self, call: PendingSave) -> int:
        """Puts ``call`` at the end; returns its index, counted from 0 over the queue's life."""
        self._calls.append((self._begun, call))
        # The last to be registered is the first to be called: before the groups of now are left.
        atexit.unregister(_finish_what_is_under_way)
        atexit.register(_finish_what_is_under_way)
        self._begun += 1
        return self._begun - 1

    def get_num_unfinalized_calls(self) -> int:
        """Returns the number of saves in progress or written, but not finalized."""
        return len(self._calls)

    def maybe_finalize_async_calls(
        self, blocking: bool = False, process_group: dist.ProcessGroup | None = None, skip_sync: bool = False
    ) -> list[int]:
        """Finalizes the oldest saves. Collective over the ranks of each save.

        Args:
            blocking: wait for all saves of the queue; otherwise finalize in order, up to the first save that some
                rank has not written.
            process_group: group of the all-reduce that counts the saves written on all ranks; None: the default
                group. A rank without saves does not delay other ranks. Not used if ``blocking``.
            skip_sync: use this rank's state without the all-reduce. Correct only if the caller ensures that all ranks
                have written the same saves.

        Returns:
            The indices of the finalized saves.

        Raises:
            CheckpointError, OSError, ...: on every rank of a save, if any of them could not write. The save counts as
                finalized; later saves remain in the queue.
        """
        count = len(self._calls)
        if not blocking:
            count = next((i for i, (_, call) in enumerate(self._calls) if not call.done()), count)
            if not skip_sync and dist.is_initialized():
                # By index, not by number: ranks that save less often may have shorter queues.
                upto = self._calls[count][0] if count < len(self._calls) else _NONE_LEFT
                (upto,) = least([upto], dist.group.WORLD if process_group is None else process_group)
                count = sum(index < upto for index, _ in self._calls)
        finalized = []
        for _ in range(count):
            index, call = self._calls.pop(0)
            call.finalize()
            finalized.append(index)
        return finalized

    def close(self) -> None:
        """Finalizes everything; collective."""
        self.maybe_finalize_async_calls(blocking=True)


# Default queue of `async_save`.
DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue()


# Time limit in seconds for all ranks to reach the end of the script.
_SECONDS_FOR_ALL = 120.0


def _finish_what_is_under_way() -> None:
    """Finalizes pending saves at the end of the script. On failure, the process exits with status 1.

    All data is written by now: the interpreter waits for the writing thread before it comes here.
    """
    calls = [call for queue in _queues for _, call in queue._calls]
    if not calls:
        return
    # After an uncaught exception other ranks may not arrive, and the exit status already reports the failure.
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    lost = [(call, "the script failed before") for call in calls] if failed else _finalized(calls)
    for call, reason in lost:
        _log.error(
            "the asynchronous save of %s was never finalized, so it will not load (%s): call "
            "maybe_finalize_async_calls(blocking=True) before the script ends or destroys its process groups",
            call.where,
            reason,
        )
    if lost and not failed:
        # Nothing else changes the status from here.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _finalized(calls: list[PendingSave]) -> list[tuple[PendingSave, str]]:
    """Finalizes ``calls`` in order; returns the failed calls with their errors."""
    lost = []
    for number, call in enumerate(calls):
        try:
            call.participants.meet(f"the end of the script, save {number} of {call.where}", _SECONDS_FOR_ALL)
            call.finalize()
        except Exception as error:
            lost.append((call, f"{type(error).__name__}: {error}"))
    return lost
