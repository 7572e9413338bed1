"""Pool of host buffers: page-locking takes milliseconds, and each step needs the same sizes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_GRAIN = 4096  # bytes; sizes that differ by a few rows share buffers
_SLACK = 2  # a free buffer at most this many times too large is taken


class HostPool:
    """Buffers of bytes on the host.

    :meth:`give` may be called by a destructor at any moment, also while this thread is inside :meth:`take`:
    it only appends to a deque.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        self.pin_memory = pin_memory
        self.allocated = 0  # buffers made
        self.reused = 0  # buffers handed out again
        self._free: list[tuple[torch.Tensor, Any]] = []  # (buffer, last transfer that touches it)
        self._returned: deque = deque()

    def take(self, nbytes: int) -> tuple[torch.Tensor, Any]:
        """Returns a buffer of at least ``nbytes`` bytes, and the transfer to wait for before a write (or None)."""
        self._collect()
        fitting = [i for i, (b, _) in enumerate(self._free) if nbytes <= b.numel() <= _SLACK * max(nbytes, _GRAIN)]
        if fitting:
            self.reused += 1
            return self._free.pop(min(fitting, key=lambda i: self._free[i][0].numel()))
        # No buffer fits. Discard free buffers that are too small: otherwise every new sequence length would add
        # buffers without limit.
        self._free = [(b, t) for b, t in self._free if b.numel() > nbytes]
        self.allocated += 1
        size = -(-nbytes // _GRAIN) * _GRAIN
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pin_memory), None

    def give(self, buffer: torch.Tensor, transfer: Any) -> None:
        """Return ``buffer`` to the pool; ``transfer`` is its last reader or writer."""
        self._returned.append((buffer, transfer))

    def free_bytes(self) -> int:
        """Total bytes of the idle buffers."""
        self._collect()
        return sum(b.numel() for b, _ in self._free)

    def clear(self) -> None:
        """Drop the idle buffers and zero the counters.

        A buffer whose last transfer is under way is safe to drop: torch keeps page-locked memory until the
        copies issued on it have ended.
        """
        self._collect()
        self._free.clear()
        self.allocated = self.reused = 0

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
