"""Output of local ranks with the rank at the beginning of each line."""

from __future__ import annotations

import sys
import threading
from typing import IO

# Seconds to wait for the last lines of ranks that have ended. A process that a rank started may keep its pipe open.
_LAST_LINES = 1.0


class TaggedOutput:
    """Copies the output of ranks line by line: `[2] text`. Lines of different ranks do not mix."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Copies the pipes of a rank to this process's stdout and stderr."""
        for pipe, target in ((stdout, sys.stdout.buffer), (stderr, sys.stderr.buffer)):
            thread = threading.Thread(target=self._copy, args=(rank, pipe, target), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _copy(self, rank: int, pipe: IO[bytes], target: IO[bytes]) -> None:
        tag = f"[{rank}] ".encode()
        for line in pipe:
            with self._lock:
                target.write(tag + line if line.endswith(b"\n") else tag + line + b"\n")
                target.flush()

    def finish(self) -> None:
        """Waits for the last lines of ranks that have ended."""
        for thread in self._threads:
            thread.join(_LAST_LINES)
