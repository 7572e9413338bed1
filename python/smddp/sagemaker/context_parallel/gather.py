"""Attention over all ranks' keys and values, gathered first: cp_comm_type="all_gather"."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from smddp.sagemaker.autograd_collectives import gather
from smddp.sagemaker.context_parallel import chunks
from smddp.sagemaker.context_parallel.kernels import Scores, attend
from smddp.sagemaker.context_parallel.masks import Mask


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    mask: Mask,
    scores: Scores,
    dropout: float,
) -> torch.Tensor:
    """(b, h, s, d), (b, g, s, d), (b, g, s, e) of this rank's tokens -> (b, h, s, e).

    torch's ``scaled_dot_product_attention`` computes it, which picks the fused kernel of the device at hand, except
    where scores are capped or heads have ``sinks``, see `ring.RingAttention`. ``dropout`` is of the probabilities.
    """
    # Keys and values in one collective.
    group = mask.tokens.group
    rows = gather(torch.cat([key.flatten(), value.flatten()]), group)
    keys, values = rows.view(group.size(), -1).split([key.numel(), value.numel()], 1)
    key = chunks.join([row.view(key.shape) for row in keys], 2)
    value = chunks.join([row.view(value.shape) for row in values], 2)
    groups = query.shape[1] // key.shape[1]
    fused = scores.softcap is None and sinks is None
    if fused and groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    parts: dict[int, torch.Tensor] = {}
    for queries, columns, visible in mask.spans():
        operands = query[:, :, queries], key[:, :, columns], value[:, :, columns]
        if fused:
            parts[queries.start] = F.scaled_dot_product_attention(
                *operands, attn_mask=visible, dropout_p=dropout, scale=scores.scale
            )
        else:
            parts[queries.start] = _eager(*operands, visible, sinks, scores)
    half = query.shape[2] // 2
    # Queries that see no key at all have no span.
    none = query.new_zeros(*query.shape[:2], half, value.shape[-1])
    return torch.cat([parts.get(first, none) for first in (0, half)], 2)


def _eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    out, lse = attend(query, key, value, visible, scores)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1)
    return out.to(value.dtype)
