"""Llama's attention layer with a fused kernel, independent of the model's attention implementation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from smddp.sagemaker.private_names import ATTENTION


class LlamaFlashAttention(LlamaAttention):
    """Replacement of LlamaForCausalLM's attention layer: same parameters and names, results equal up to rounding.

    Args:
        config: the model's; it is not changed.
        layer_idx: the layer's number; needed where a transformers Cache is used.
    """

    def __init__(self, config: LlamaConfig, layer_idx: int | None = None) -> None:
        # The class computes by the implementation that its config names; the model's masks follow the model's.
        own = copy.copy(config)
        ATTENTION.of(own)
        own._attn_implementation = "sdpa"
        super().__init__(own, layer_idx)  # type: ignore[arg-type]  # it is read only where there is a Cache
        # Created on first use and outside the module tree: it has no state to save or initialise.
        self.__dict__["_rotary"] = None

    def forward(  # type: ignore[override]  # with what older decoder layers pass, too
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        use_cache: bool = False,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple:
        """Attend.

        Args:
            hidden_states: (b, s, hidden).
            attention_mask: None: causal; (b, keys): 0 where a key is padding; (b, 1, s, keys): what the model makes.
            position_ids: (b, s); None: from the number of cached keys on.
            past_key_value: earlier keys and values: a transformers Cache, or a pair of (b, key heads, n, d).
            output_attentions: refused: no fused kernel has the weights.
            use_cache: return the keys and values.
            position_embeddings, past_key_values: what today's decoder layers pass instead of position_ids and
                past_key_value.

        Returns (output, None) to a decoder layer that passes position_embeddings; else (output, None, cache), where
        cache is what continues from here if use_cache, or None. output is (b, s, hidden).

        Raises ValueError for output_attentions, and for a Cache without layer_idx.
        """
        if output_attentions:
            raise ValueError("LlamaFlashAttention has no attention weights: set output_attentions=False")
        past = past_key_values if past_key_values is not None else past_key_value
        if isinstance(past, (tuple, list)) or (past is None and use_cache and position_embeddings is None):
            past = _Pair(past)
        elif past is not None and self.layer_idx is None:
            raise ValueError("a Cache is kept by layer: make LlamaFlashAttention(config, layer_idx=...)")
        today = position_embeddings is not None
        length, seen = hidden_states.shape[1], 0 if past is None else past.get_seq_length(*self._layer(past))
        if position_embeddings is None:
            if position_ids is None:
                position_ids = torch.arange(seen, seen + length, device=hidden_states.device).unsqueeze(0)
            position_embeddings = self._rotary_on(hidden_states.device)(hidden_states, position_ids)
        output, _ = super().forward(
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=_expanded(attention_mask, length, seen, hidden_states),
            past_key_values=past,
            **kwargs,
        )
        if today:
            return output, None
        return output, None, (past.pair if isinstance(past, _Pair) else past) if use_cache else None

    def _layer(self, past: Any) -> tuple:
        return () if isinstance(past, _Pair) else (self.layer_idx,)

    def _rotary_on(self, device: torch.device) -> LlamaRotaryEmbedding:
        rotary = self.__dict__["_rotary"]
        if rotary is None or rotary.inv_freq.device != device:
            rotary = self.__dict__["_rotary"] = LlamaRotaryEmbedding(self.config).to(device)
        return rotary


class _Pair:
    """Cache of one layer's keys and values, accepted by the attention layer."""

    def __init__(self, pair: Any) -> None:
        self.pair = None if pair is None else tuple(pair)

    def get_seq_length(self) -> int:
        return 0 if self.pair is None else self.pair[0].shape[2]

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
        if self.pair is not None:
            keys, values = torch.cat([self.pair[0], keys], dim=2), torch.cat([self.pair[1], values], dim=2)
        self.pair = (keys, values)
        return self.pair


def _expanded(mask: torch.Tensor | None, length: int, seen: int, like: torch.Tensor) -> torch.Tensor | None:
    """A mask of four dimensions for torch's attention: causal and without padding; None where torch's own will do."""
    if mask is not None and mask.dim() == 4:
        return mask
    if mask is None and (seen == 0 or length == 1):
        return None
    past = torch.ones(length, seen + length, dtype=torch.bool, device=like.device).tril(seen)
    if mask is None:
        return past[None, None]
    if mask.dim() != 2 or mask.shape != (like.shape[0], seen + length):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it is (b, keys) = ({like.shape[0]}, {seen + length}) or "
            f"(b, 1, s, keys)"
        )
    # A padded query has only masked keys: unmask its own position to avoid a division by zero in softmax.
    own = torch.eye(length, dtype=torch.bool, device=like.device)
    own = torch.cat([torch.zeros(length, seen, dtype=torch.bool, device=like.device), own], dim=1)
    return (past & mask.bool()[:, None, None, :]) | own
