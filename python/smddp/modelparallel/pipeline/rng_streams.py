"""Random numbers in a step: code between parts draws the same on all ranks, whatever parts draw.

Each microbatch has two streams of torch's default generator: one for the code that all ranks run, seeded alike, and
one for what this stage alone runs. Neither depends on which microbatch runs when.
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
        """From the code that all run to a part of this stage, or back."""
        generator = torch.default_generator
        before = generator.get_state()
        generator.set_state(self._other)
        self._other = before

    def resume(self) -> None:
        """This microbatch runs from here."""
        torch.default_generator.set_state(self._saved)

    def pause(self) -> None:
        """Another one will."""
        self._saved = torch.default_generator.get_state()
