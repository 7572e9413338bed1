"""Assignment of 2·cp sequence chunks to the ranks of a context group."""

from __future__ import annotations

import torch


def held_by(rank: int, size: int) -> tuple[int, int]:
    """Returns the two chunks of rank ``rank`` of ``size``, one from each end, which balances causal attention."""
    return rank, 2 * size - rank - 1


def cut(whole: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
    """Returns rank ``rank``'s part of ``whole``: its two chunks concatenated along ``dim``.

    Raises ValueError if ``dim`` does not divide into 2·size chunks.
    """
    length = whole.shape[dim]
    if length % (2 * size):
        raise ValueError(
            f"sequences of {length} tokens ({tuple(whole.shape)}, dimension {dim}) do not divide into the "
            f"2 x {size} chunks of context_parallel_degree={size}: pad them to {_next_multiple(length, 2 * size)}"
        )
    chunks = whole.chunk(2 * size, dim)
    early, late = held_by(rank, size)
    return torch.cat([chunks[early], chunks[late]], dim)


def _next_multiple(length: int, of: int) -> int:
    return -(-length // of) * of


def join(parts: list[torch.Tensor], dim: int = 1) -> torch.Tensor:
    """Joins the parts of all ranks, given in order of rank."""
    early, late = zip(*(part.chunk(2, dim) for part in parts))
    return torch.cat([*early, *reversed(late)], dim)


def indices(rank: int, size: int, length: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the positions of rank ``rank``'s tokens in a sequence of ``length``: ascending, (length / size,)."""
    return cut(torch.arange(length, device=device), rank, size, 0)
