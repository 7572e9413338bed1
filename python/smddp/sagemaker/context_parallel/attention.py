"""Attention functions of context-parallel models, registered with transformers.

`AttentionInterface` and `AttentionMaskInterface` are transformers' public way for attention of one's own, in 4.57 and
in 5: whatever model asks them for its attention can be split along the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp.sagemaker.context_parallel import masks
from smddp.sagemaker.context_parallel.gather import gathered_attention
from smddp.sagemaker.context_parallel.kernels import Scores
from smddp.sagemaker.context_parallel.masks import Mask
from smddp.sagemaker.context_parallel.ring import RingAttention

P2P, ALL_GATHER = "p2p", "all_gather"
COMM_TYPES = (P2P, ALL_GATHER)

# Arguments of transformers' attention functions that change the scores and are unsupported here.
_UNKNOWN = ("position_bias", "head_mask", "cache")


def implementation(comm_type: str) -> str:
    """Returns the name of the attention implementation for ``comm_type``; registers it on the first call."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"context_parallel_{comm_type}"
    AttentionInterface.register(name, {P2P: p2p, ALL_GATHER: all_gather}[comm_type])
    AttentionMaskInterface.register(name, masks.make)
    return name


def p2p(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Ring attention with the interface of transformers' attention functions.

    Args:
        module: the attention layer.
        query, key, value: (batch, heads, this rank's tokens, elements of a head); fewer heads of keys and values are
            shared by as many query heads each.
        attention_mask: what `masks.make` returned.
        scaling: of the scores; None: 1 / sqrt(elements of a head).
        dropout: must be 0.
        others: "softcap" and "s_aux" (a sink for each head) are known, all else must not change the scores.

    Returns:
        (batch, this rank's tokens, heads, elements of a value), and no weights.

    Raises ValueError or NotImplementedError before anything is sent.
    """
    if dropout:
        raise ValueError(
            f"{type(module).__name__}: dropout of {dropout} on attention weights does not run with "
            f'cp_comm_type="{P2P}": set the model\'s attention dropout to 0, or use cp_comm_type="{ALL_GATHER}"'
        )
    mask, scores, sinks = _asked(module, query, key, attention_mask, scaling, others)
    operands = _as_under_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        out = RingAttention.apply(*operands, sinks, mask, scores)
    return out.transpose(1, 2).contiguous(), None


def all_gather(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over gathered keys and values; supports ``dropout`` without score caps and sinks."""
    mask, scores, sinks = _asked(module, query, key, attention_mask, scaling, others)
    if dropout and (scores.softcap is not None or sinks is not None):
        raise ValueError(
            f"{type(module).__name__}: dropout of {dropout} on attention weights does not run with softcap or sinks "
            "under context parallelism: set the model's attention dropout to 0"
        )
    operands = _as_under_autocast(query, key, value)
    with torch.autocast(query.device.type, enabled=False):
        out = gathered_attention(*operands, sinks, mask, scores, dropout)
    return out.transpose(1, 2).contiguous(), None


def _asked(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: Any,
    scaling: float | None,
    others: dict[str, Any],
) -> tuple[Mask, Scores, torch.Tensor | None]:
    """Returns the mask, the score function and sinks; raises for unsupported arguments."""
    name = type(module).__name__
    if not isinstance(mask, Mask):
        raise NotImplementedError(
            f"{name} got {type(mask).__name__} for a mask, not what transformers' mask registry makes: its model's "
            "masks are its own, or it attends to another sequence; set context_parallel_degree=1 for this model"
        )
    for argument in _UNKNOWN:
        if others.get(argument) is not None:
            raise NotImplementedError(f"{name}: {argument} does not run under context parallelism; set the degree to 1")
    tokens = query.shape[2]
    if not tokens == key.shape[2] == mask.tokens.length // mask.tokens.size:
        raise ValueError(
            f"{name}: {tokens} queries and {key.shape[2]} keys, where this rank holds "
            f"{mask.tokens.length // mask.tokens.size} tokens: a cache of keys cannot be used (use_cache=False)"
        )
    mask.attended.add(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return mask, Scores(scale, others.get("softcap")), others.get("s_aux")


def _as_under_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Casts to one dtype: autocast's dtype, as for torch's attention, else the dtype of the values."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)
