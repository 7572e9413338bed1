"""The thread that looks at the recorder now and then: for metrics, and for a rank that is late again and again."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings

from smddp._native import core
from smddp.observability import status
from smddp.observability.exporter import FILE, PORT, Exposition
from smddp.observability.log import warn
from smddp.observability.stragglers import Straggler, Stragglers

# Seconds after which a straggler is told of again.
_AGAIN = 600.0
# Seconds between two comparisons at most: a rank that is 200 ms late is to be named within fifty steps, also where a
# step has one operation, so that twenty of them are twenty steps.
_LONGEST = 4.0

_watch: Watch | None = None
_pid: int | None = None


def start(rank: int) -> None:
    """Look from now on if a setting asks for it. rank: this process's in the job. Idempotent; never raises."""
    global _watch, _pid
    if _pid == os.getpid():
        return
    _pid, _watch = os.getpid(), None
    settings = {name: value for name, value, *_ in core().settings()}
    if settings.get(FILE) or settings.get(PORT) or settings.get("SMDDP_STRAGGLERS") == "1":
        _watch = Watch(rank, settings)


def look() -> None:
    """Look now: a group is about to go. Never raises."""
    if _watch is not None and _pid == os.getpid():
        _watch.look()


def address() -> tuple[str, int] | None:
    """Where this process serves its metrics."""
    shown = _watch.exposition if _watch is not None and _pid == os.getpid() else None
    return shown.address if shown is not None else None


class Watch:
    """What fails here is told, once for each reason, and ends nothing."""

    def __init__(self, rank: int, settings: dict[str, str]) -> None:
        self._warned: set[str] = set()
        self.exposition = self._exposed(rank, settings)
        self._stragglers = Stragglers() if settings.get("SMDDP_STRAGGLERS") == "1" else None
        self._named: dict[tuple[str, int], float] = {}
        interval = float(settings["SMDDP_METRICS_INTERVAL"])
        self._interval = min(interval, _LONGEST) if self._stragglers is not None else interval
        self._over, self._looking = threading.Event(), threading.Lock()
        self.look()
        threading.Thread(target=self._run, name="smddp-watch", daemon=True).start()
        atexit.register(self._end, os.getpid())

    def _exposed(self, rank: int, settings: dict[str, str]) -> Exposition | None:
        asked = [name for name in (FILE, PORT) if settings.get(name)]
        if not asked:
            return None
        try:
            return Exposition(rank, settings, self._warn)
        except ImportError as error:
            warnings.warn(
                f"{' and '.join(asked)}: no metrics without prometheus_client ({error}); pip install 'smddp[metrics]'",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def look(self) -> None:
        """What is so now is what metrics say from now on."""
        if self.exposition is None:
            return
        from smddp.observability.info import traffic

        try:
            # What is older than what was taken would look like another group's.
            with self._looking:
                self.exposition.take(json.loads(core().dump()), traffic())
        except Exception as error:  # the job does not end for its metrics
            self._warn(f"metrics: {type(error).__name__}: {error}")

    def compare(self) -> list[Straggler]:
        """Who is late now among the ranks of this host, if this is the first of them; what is new is told."""
        if self._stragglers is None:
            return []
        try:
            found = self._stragglers.look(status.job())
        except Exception as error:
            self._warn(f"stragglers: {type(error).__name__}: {error}")
            return []
        now = time.monotonic()
        for one in found:
            if now - self._named.get((one.group, one.rank), -_AGAIN) >= _AGAIN:
                self._named[one.group, one.rank] = now
                warn(str(one))
        if self.exposition is not None:
            self.exposition.late(found)
        return found

    def _run(self) -> None:
        self._write()
        while not self._over.wait(self._interval):
            self.look()
            self.compare()
            self._write()

    def _write(self) -> None:
        if self.exposition is not None:
            self.exposition.write()

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:
            self._over.set()
            self.look()
            self._write()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)
