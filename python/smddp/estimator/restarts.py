"""Restarts of a job that lost a host: use_spot_instances, max_wait and max_retry_attempts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from smddp.estimator.running import LaunchError

#: Seconds before the first restart, doubled for each further one, and the longest.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
#: The service's own limit.
_MOST_ATTEMPTS = 30


@dataclass(frozen=True)
class Restarts:
    """The conditions of restarts.

    spot: a lost host restarts the job without a limit. attempts: the largest number of restarts; None without one.
    max_wait: limit in seconds for the whole job, with its restarts and the pauses before them.
    """

    spot: bool = False
    attempts: int | None = None
    max_wait: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for invalid limits."""
        if self.attempts is not None and not (_is_count(self.attempts) and self.attempts <= _MOST_ATTEMPTS):
            raise ValueError(f"max_retry_attempts is {self.attempts!r}: expected a number from 1 to {_MOST_ATTEMPTS}")
        if self.max_wait is not None and not _is_count(self.max_wait):
            raise ValueError(f"max_wait is {self.max_wait!r}: expected a time limit in seconds, 1 or more")

    def check(self, max_run: int | None) -> None:
        """Raises ValueError for a max_wait that the service refuses."""
        if self.max_wait is None:
            return
        if not self.spot:
            raise ValueError(f"max_wait is {self.max_wait} without use_spot_instances=True: give both, or max_run")
        if max_run is not None and self.max_wait < max_run:
            raise ValueError(f"max_wait is {self.max_wait}, less than max_run={max_run}: expected {max_run} or more")

    def check_engine(self, engine: str) -> None:
        """Raises ValueError for a job of an engine, which restarts jobs by its own rules."""
        for name, given in (("use_spot_instances", self.spot), ("max_retry_attempts", self.attempts)):
            if given:
                raise ValueError(
                    f"{name}: {engine} restarts jobs by its own rules: leave it out, and give the engine's option "
                    "(torchx: max_retries; slurm: additional_parameters={'requeue': True}; kubernetes: the runtime's)"
                )

    def pause(self, error: BaseException, restarts: int) -> float | None:
        """Returns the seconds before the next restart; None where the job ends with `error`.

        restarts: number of restarts before. Only a lost host restarts a job: an error of the script would recur.
        """
        if not (isinstance(error, LaunchError) and error.lost_host and (self.spot or self.attempts)):
            return None
        if self.attempts is not None and restarts >= self.attempts:
            return None
        return min(_PAUSE * 2 ** min(restarts, 10), _LONGEST_PAUSE)


class Limits:
    """Timers of max_run, which counts seconds of running ranks over all attempts, and of max_wait, which counts all."""

    def __init__(self, max_run: int | None, max_wait: int | None, stop: Callable[[str], None]) -> None:
        """Starts max_wait. stop: called with the name of the limit that is reached first."""
        self._stop = stop
        self._left: float | None = max_run
        self._begun = 0.0
        self._run: threading.Timer | None = None
        self._wait = self._timer("max_wait", max_wait)

    def ranks_begin(self) -> None:
        self._begun = time.monotonic()
        self._run = self._timer("max_run", self._left)

    def ranks_ended(self) -> None:
        if self._run is not None and self._left is not None:
            self._run.cancel()
            self._left = max(self._left - (time.monotonic() - self._begun), 0)

    def cancel(self) -> None:
        for timer in (self._run, self._wait):
            if timer is not None:
                timer.cancel()

    def _timer(self, name: str, seconds: float | None) -> threading.Timer | None:
        if seconds is None:
            return None
        timer = threading.Timer(seconds, self._stop, (name,))
        timer.daemon = True
        timer.start()
        return timer


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
