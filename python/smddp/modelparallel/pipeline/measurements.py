"""Measurements of a step on this stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Measured:
    """Measurements of the last step on this stage, for timelines and tests."""

    def __init__(self) -> None:
        self.peak = 0
        self.segments = 0
        self.operations = 0
        # (piece, microbatch, from, to)
        self.pieces: list[tuple[str, int, float, float]] = []

    @contextlib.contextmanager
    def busy(self, piece: str, microbatch: int) -> Iterator[None]:
        """Record a piece of work on this stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.pieces.append((piece, microbatch, begun, time.perf_counter()))
