"""Output of local ranks with the rank at the beginning of each line."""

from __future__ import annotations

import os
import selectors
import sys
from dataclasses import dataclass, field
from typing import IO

# Bytes after which an incomplete line is written.
_LONGEST_LINE = 64 << 10


@dataclass
class _Stream:
    """Output stream of a rank, and the bytes of its last line, which is not complete."""

    tag: bytes
    target: IO[bytes]
    rest: bytes = field(default=b"")


class TaggedOutput:
    """Copies the output of ranks line by line: `[2] text`. Lines of different ranks do not mix."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, rank: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        """Copies the pipes of a rank to this process's stdout and stderr."""
        for pipe, target in ((stdout, sys.stdout.buffer), (stderr, sys.stderr.buffer)):
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(f"[{rank}] ".encode(), target))

    def copy(self, seconds: float) -> bool:
        """Copies what has arrived; waits for it at most `seconds`. Returns False if nothing has arrived."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            stream: _Stream = key.data
            chunk = os.read(key.fd, _LONGEST_LINE)
            # A carriage return ends a line, too: progress bars end with it.
            *lines, rest = (stream.rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\r\n").split(b"\n")
            if not chunk or len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, *([rest] if rest else [])], b""
            stream.rest = rest
            if not chunk:
                self._close(key)
            if lines:
                self._write(stream, lines)
        return bool(ready)

    def finish(self) -> None:
        """Copies the last lines of ranks that have ended. A process that a rank started may keep its pipe open."""
        while self.copy(0):
            pass
        for key in list(self._selector.get_map().values()):
            if key.data.rest:
                self._write(key.data, [key.data.rest])
            self._close(key)

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        text = b"".join(stream.tag + line + (b"" if line.endswith(b"\r") else b"\n") for line in lines)
        try:
            stream.target.write(text)
            stream.target.flush()
        except OSError:
            # The reader has closed its end. The ranks get the same error from their closed pipes.
            for key in list(self._selector.get_map().values()):
                if key.data.target is stream.target:
                    self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        if key.fd in self._selector.get_map():
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
