"""Random number streams of a step: code between parts draws equal numbers on all ranks.

Each microbatch has two streams of torch's default generator: one with a common seed for code that all ranks run, and
one for the parts of this stage. Neither depends on the order of microbatches.
"""

from __future__ import annotations

import torch

_MASK = (1 << 62) - 1


def _state(*words: int) -> torch.Tensor:
    seed = 0
    for word in words:
        seed = (seed * 6364136223846793005 + word + 1442695040888963407) & _MASK
    return torch.Generator().manual_seed(seed).get_state()


class Streams:
    """The streams of one microbatch on one stage."""

    __slots__ = ("_other", "_saved")

    def __init__(self, seed: int, microbatch: int, stage: int) -> None:
        self._saved = _state(seed, microbatch)
        self._other = _state(seed, microbatch, stage + 1)

    def swap(self) -> None:
        """Switch between the common stream and the stream of this stage."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.set_state(self._other)
        self._other = before

    def resume(self) -> None:
        """Restore the stream of this microbatch."""
        torch.default_generator.set_state(self._saved)

    def pause(self) -> None:
        """Save the stream before another microbatch runs."""
        self._saved = torch.default_generator.get_state()
