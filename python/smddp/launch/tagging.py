"""Output of local ranks with the rank at the beginning of each line."""

from __future__ import annotations

import array
import fcntl
import os
import selectors
import sys
import termios
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

    def copy(self, seconds: float) -> None:
        """Copies what has arrived; waits for it at most `seconds`."""
        for key, _ in self._selector.select(seconds):
            self._read(key)

    def finish(self) -> None:
        """Copies what ranks that have ended left in their pipes. A process that a rank started may write further lines;
        they are not copied."""
        for key in list(self._selector.get_map().values()):
            left = array.array("i", [0])
            fcntl.ioctl(key.fd, termios.FIONREAD, left)
            while left[0] > 0 and (count := self._read(key)):
                left[0] -= count
            if key.data.rest:
                self._write(key.data, [key.data.rest])
            self._close(key)

    def _read(self, key: selectors.SelectorKey) -> int:
        """Copies the lines of one read, and returns its bytes: 0 at the end of the output."""
        if key.fd not in self._selector.get_map():
            return 0  # closed with the other pipes of its target
        stream: _Stream = key.data
        chunk = os.read(key.fd, _LONGEST_LINE)
        # A carriage return ends a line, too: progress bars end with it.
        *lines, rest = (stream.rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\r\n").split(b"\n")
        if rest and (not chunk or len(rest) > _LONGEST_LINE):
            lines, rest = [*lines, rest], b""
        stream.rest = rest
        if not chunk:
            self._close(key)
        if lines:
            self._write(stream, lines)
        return len(chunk)

    def _write(self, stream: _Stream, lines: list[bytes]) -> None:
        text = b"".join(stream.tag + line + (b"" if line.endswith(b"\r") else b"\n") for line in lines)
        try:
            stream.target.write(text)
            stream.target.flush()
        except OSError:
            # The reader has closed its end. The ranks get the same error from their closed pipes, and the interpreter
            # flushes the rest to /dev/null at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.target.fileno())
            for key in list(self._selector.get_map().values()):
                if key.data.target is stream.target:
                    self._close(key)

    def _close(self, key: selectors.SelectorKey) -> None:
        if key.fd in self._selector.get_map():
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
