"""Attention over a subset of the keys with mergeable results: outputs and their log-sum-exp.

The running log-sum-exp is that of online softmax (Milakov and Gimelshein, 2018; Rabe and Staats, 2021), and the
backward pass from the final log-sum-exp that of FlashAttention (Dao et al., 2022). As in transformers' eager
attention, products are taken in the inputs' dtype, and the softmax in float32.

Dimensions: b batch, h query heads, g key and value heads (h is a multiple of g), s queries, t keys, d and e elements
of a key and of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Scores that are held at once, per call: 2**26 of them are 256 MiB.
_MOST_SCORES = 2**26


@dataclass(frozen=True)
class Scores:
    """Attention score function: query-key products times ``scale``, then softcap * tanh(. / softcap)."""

    scale: float
    softcap: float | None = None

    def of(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """(b, h, s, d), (b, g, t, d) -> float32 (b, h, s, t)."""
        scores = _products(query, key.transpose(-1, -2)).float() * self.scale
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def backward(self, scores: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the products from the gradient of ``scores``."""
        if self.softcap is not None:
            grad = grad * (1 - (scores / self.softcap) ** 2)
        return grad * self.scale


def _products(many: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
    """Grouped matrix products (b, h, s, x) @ (b, g, x, y) -> (b, h, s, y), h / g heads per group."""
    b, h, s, x = many.shape
    g = few.shape[1]
    # The heads that share a key become rows of one product, so that no key is copied.
    return (many.reshape(b, g, h // g * s, x) @ few).view(b, h, s, few.shape[-1])


def _sums(left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    """(b, h, s, t), (b, h, s, x) -> (b, g, t, x): left^T @ right, summed over the heads that share a key."""
    b, h, s, t = left.shape
    rows = h // groups * s
    return left.reshape(b, groups, rows, t).transpose(-1, -2) @ right.reshape(b, groups, rows, right.shape[-1])


def _masked(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse); 0 in the rows of queries that see no key, whose log-sum-exp is -inf."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over these keys only.

    Args:
        query: (b, h, s, d).
        key: (b, g, t, d).
        value: (b, g, t, e).
        mask: bool, broadcastable to (b, 1, s, t), True where the query sees the key; None: everywhere.
        scores: how scores come from products.

    Returns:
        the outputs (b, h, s, e), float32, and the log-sum-exp of the scores (b, h, s), float32. A query that sees no
        key has output 0 and -inf.
    """
    outputs, sums = [], []
    for rows in _tiles(query, key):
        found = _masked(scores.of(query[:, :, rows], key), _rows(mask, rows))
        lse = torch.logsumexp(found, -1)
        outputs.append(_products(probabilities(found, lse).to(value.dtype), value).float())
        sums.append(lse)
    return _one(outputs), _one(sums)


def attend_backward(
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the contribution of these keys to the gradients of attention over all keys.

    Args:
        grad: of the outputs, (b, h, s, e).
        delta: of each query, the sum of grad x output over its elements, float32 (b, h, s).
        lse: over all keys, float32 (b, h, s).
        query, key, value, mask, scores: as for `attend`.

    Returns:
        gradients of query, key and value, float32.
    """
    groups = key.shape[1]
    of_query = []
    of_key = torch.zeros_like(key, dtype=torch.float32)
    of_value = torch.zeros_like(value, dtype=torch.float32)
    for rows in _tiles(query, key):
        part, grad_part = query[:, :, rows], grad[:, :, rows]
        found = scores.of(part, key)
        weights = probabilities(_masked(found, _rows(mask, rows)), lse[:, :, rows])
        of_value += _sums(weights.to(grad.dtype), grad_part, groups)
        of_weights = _products(grad_part, value.transpose(-1, -2)).float()
        of_scores = weights * (of_weights - delta[:, :, rows].unsqueeze(-1))
        of_products = scores.backward(found, of_scores).to(query.dtype)
        of_query.append(_products(of_products, key).float())
        of_key += _sums(of_products, part, groups)
    return _one(of_query), of_key, of_value


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge attention over further keys, ``part`` with ``part_lse``, into ``out`` and ``lse``, in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_(probabilities(lse.unsqueeze(-1), both)).add_(part * probabilities(part_lse.unsqueeze(-1), both))
    lse.copy_(both)


def _tiles(query: torch.Tensor, key: torch.Tensor) -> list[slice]:
    """Splits the queries into tiles whose scores fit into memory."""
    b, h, s, _ = query.shape
    rows = max(1, _MOST_SCORES // max(1, b * h * key.shape[2]))
    return [slice(first, min(first + rows, s)) for first in range(0, s, rows)]


def _rows(mask: torch.Tensor | None, rows: slice) -> torch.Tensor | None:
    return mask if mask is None else mask[:, :, rows]


def _one(tiles: list[torch.Tensor]) -> torch.Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, 2)
