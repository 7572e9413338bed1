"""Follows a job of an external scheduler through the files in its folder: ranks' output and failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from smddp.estimator.running import Failure

#: Seconds until files of other hosts are visible here after a job's end.
_SEEN = 5.0


class Follower:
    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._logs, self._failed = folder / "logs", folder / "failures"
        self._report = report
        self._read: dict[Path, int] = {}
        self._parts: dict[Path, bytes] = {}
        self._known: set[str] = set()
        self.failures: dict[int, Failure] = {}

    def poll(self) -> None:
        """Reports new output lines and new failures."""
        for file in sorted(self._logs.glob("rank-*.*")):
            self._pass_on(file)
        for file in sorted(self._failed.glob("*.json")):
            failure = None if file.stem in self._known else Failure.parse(file.read_text(errors="replace"))
            if failure is not None:
                self._known.add(file.stem)
                self.failures[failure.rank] = failure
                self._report(f"smddp: rank {failure.rank} (host {failure.host}, pid {failure.pid}) {failure.how}")

    def drain(self, failed: bool) -> None:
        """Reports the remaining output after the job's end. If it failed, waits up to 5 s for a rank's failure file."""
        until = time.monotonic() + _SEEN
        self.poll()
        while failed and not self.failures and time.monotonic() < until:
            time.sleep(0.2)
            self.poll()
        for file, part in self._parts.items():
            if part:
                self._say(file, part)

    def _pass_on(self, file: Path) -> None:
        with open(file, "rb") as log:
            log.seek(self._read.get(file, 0))
            data = log.read()
        self._read[file] = self._read.get(file, 0) + len(data)
        *lines, self._parts[file] = (self._parts.get(file, b"") + data).split(b"\n")
        for line in lines:
            self._say(file, line)

    def _say(self, file: Path, line: bytes) -> None:
        self._report(f"[rank {file.stem.removeprefix('rank-')}] {line.decode(errors='replace')}")
