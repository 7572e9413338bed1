"""Thread that reads the recorder periodically, for metrics and for straggler detection."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import warnings

from smddp._native import core
from smddp.observability import links, status
from smddp.observability.exporter import FILE, PORT, Exposition
from smddp.observability.log import warning
from smddp.observability.stragglers import Straggler, Stragglers

# Seconds before the same straggler is reported again.
_AGAIN = 600.0
# Maximum seconds between two comparisons. A rank that is 200 ms late is then reported within fifty steps, even with one
# operation per step.
_LONGEST = 4.0
# Successive readings that find a link slow before it is reported.
_READINGS = 3
# Maximum number of reported links, the slowest ones.
_MOST_LINKS = 5

_watch: Watch | None = None
_pid: int | None = None


def start(rank: int) -> None:
    """Starts the thread if a setting enables it. rank: global rank of this process. Idempotent; never raises."""
    global _watch, _pid
    if _pid == os.getpid():
        return
    _pid, _watch = os.getpid(), None
    settings = {name: value for name, value, *_ in core().settings()}
    if settings.get(FILE) or settings.get(PORT) or settings.get("SMDDP_STRAGGLERS") == "1":
        _watch = Watch(rank, settings)


def update() -> None:
    """Updates the metrics at once, before a group is closed. Never raises."""
    if _watch is not None and _pid == os.getpid():
        _watch.update()


def address() -> tuple[str, int] | None:
    """Returns the address of this process's metrics server, or None."""
    shown = _watch.exposition if _watch is not None and _pid == os.getpid() else None
    return shown.address if shown is not None else None


class Watch:
    """Periodic update of metrics and stragglers. Each error is logged once and does not stop the job."""

    def __init__(self, rank: int, settings: dict[str, str]) -> None:
        self._warned: set[str] = set()
        self.exposition = self._exposed(rank, settings)
        self._stragglers = Stragglers() if settings.get("SMDDP_STRAGGLERS") == "1" else None
        self._named: dict[tuple[object, ...], float] = {}
        self._links = links.History()
        interval = float(settings["SMDDP_METRICS_INTERVAL"])
        self._interval = min(interval, _LONGEST) if self._stragglers is not None else interval
        self._over, self._updating = threading.Event(), threading.Lock()
        self.update()
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

    def update(self) -> None:
        """Updates the metrics from the recorder."""
        if self.exposition is None:
            return
        from smddp.observability.info import traffic

        try:
            # An older dump after a newer one would be counted as another group.
            with self._updating:
                self.exposition.take(json.loads(core().dump()), traffic())
        except Exception as error:  # the job does not end for its metrics
            self._warn(f"metrics: {type(error).__name__}: {error}")

    def compare(self) -> list[Straggler]:
        """Returns the current stragglers on this host, and logs new ones and new slow links.

        Only the host's first rank compares.
        """
        if self._stragglers is None:
            return []
        try:
            dumps = status.job()
            found, slow = self._stragglers.update(dumps), self._links.read([dumps])[0]
        except Exception as error:
            self._warn(f"stragglers: {type(error).__name__}: {error}")
            return []
        for one in found:
            self._report((one.group, one.rank), str(one))
        for link in slow[:_MOST_LINKS]:
            if link.readings >= _READINGS:
                self._report((link.group_id, link.rank, link.peer), str(link))
        if self.exposition is not None:
            self.exposition.late(found)
        return found

    def _report(self, key: tuple[object, ...], text: str) -> None:
        """Logs a straggler or a slow link, at most once in ten minutes."""
        now = time.monotonic()
        if now - self._named.get(key, -_AGAIN) >= _AGAIN:
            self._named[key] = now
            warning(text)

    def _run(self) -> None:
        self._write()
        while not self._over.wait(self._interval):
            self.update()
            self.compare()
            self._write()

    def _write(self) -> None:
        if self.exposition is not None:
            self.exposition.write()

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:
            self._over.set()
            self.update()
            self._write()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warning(text)
