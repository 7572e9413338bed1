"""Record of one microbatch's step function, to locate the first difference between the programs of two ranks.

Every rank of a pipeline makes the same calls of parts and the same operations on placed tensors, in the same order.
Each message carries a running hash of them. A rank that waits for long sends its whole record.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass, field

import torch

# Folders whose frames are not the script's.
_SMP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (_SMP + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)

Line = tuple[int, str, str, int]


@dataclass
class Program:
    """Program record: for each line its cumulative hash, its operation, and the file and line of the script."""

    lines: list[Line] = field(default_factory=list)
    hash: int = 0
    ended: bool = False

    def note(self, name: str, operands: object) -> None:
        """Record a line: operation ``name`` on ``operands``, equal on all ranks."""
        self.hash = zlib.crc32(f"{name}{operands}".encode(), self.hash)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        self.lines.append((self.hash, name, frame.f_code.co_filename, frame.f_lineno))

    def place(self) -> tuple[int, int]:
        """Return the number of lines and their hash."""
        return len(self.lines), self.hash


def at(line: Line) -> str:
    """Return a line in the format of error messages."""
    return f"{line[1]} at {line[2]}:{line[3]}"


def parting(mine: list[Line], mine_ended: bool, theirs: list[Line], theirs_ended: bool) -> tuple[int, str, str] | None:
    """Return the number and both versions of the first differing line; None if the programs agree."""
    for number, (one, other) in enumerate(zip(mine, theirs)):
        if one[0] != other[0]:
            return number, at(one), at(other)
    number = min(len(mine), len(theirs))
    if len(mine) > number and theirs_ended:
        return number, at(mine[number]), "the end of the step"
    if len(theirs) > number and mine_ended:
        return number, "the end of the step", at(theirs[number])
    return None
