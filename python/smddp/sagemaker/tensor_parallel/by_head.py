"""Refusal of arguments that hold, or ask for, values of every head, since each rank computes its share of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from smddp.sagemaker import hf
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel.modules import Column, FusedGroupColumn, KeyValueColumn

_MASKS = ("head_mask", "decoder_head_mask", "cross_attn_head_mask")


def refuse_by_head(model: nn.Module, heads: Mapping[str, tuple[int, int]]) -> None:
    """Let every transformers model in ``model`` whose heads are shared refuse such arguments, before it computes.

    Args:
        heads: attention module's name -> (query heads, key and value heads) of this rank, where they are known.
    """
    known = {id(model.get_submodule(name)): key_value for name, (_, key_value) in heads.items()}
    for name, module in model.named_modules():
        if not hf.is_pretrained(module):
            continue
        here = {known[id(child)] for child in module.modules() if id(child) in known}
        if here or any(map(_shares_heads, module.modules())):
            refusal = _Refusal(name or type(module).__name__, here)
            module.register_forward_pre_hook(refusal, with_kwargs=True, prepend=True)


def _shares_heads(module: nn.Module) -> bool:
    """Return whether ``module`` is an attention module with a projection by heads."""
    if hf.head_dim(module) is None and hf.heads_of(module)[0] is None:
        return False
    kinds = (Column, FusedGroupColumn, KeyValueColumn)
    return any(isinstance(child, kinds) and not vars(child).get("_tp_gather", False) for child in module.modules())


class _Refusal:
    """A forward pre-hook of one model. Raises NotImplementedError or ValueError."""

    def __init__(self, name: str, key_value_heads: set[int]) -> None:
        self._name, self._heads = name, key_value_heads

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_attentions")
        if asked is None and not torch.compiler.is_compiling():
            asked = getattr(module.config, "output_attentions", False)
        if asked:
            raise NotImplementedError(
                f"{self._name}: output_attentions=True with tensor_parallel_degree={state.tp_size}: each rank computes "
                "the attention weights of its share of the heads. Leave output_attentions out, or load the model with "
                "tensor_parallel_degree=1 for it"
            )
        for mask in _MASKS:
            if kwargs.get(mask) is not None:
                raise NotImplementedError(
                    f"{self._name}: {mask} with tensor_parallel_degree={state.tp_size}: it is for all heads, and each "
                    f"rank computes its share of them. Leave {mask} out, or set tensor_parallel_degree=1"
                )
        keys = hf.cached_keys(kwargs.get("past_key_values"))
        # Other head counts belong to family-specific cache formats.
        if (
            keys is not None
            and self._heads
            and keys.shape[1] not in self._heads
            and keys.shape[1] == hf.key_value_heads(module)
        ):
            raise ValueError(
                f"{self._name}: past_key_values have keys of all {keys.shape[1]} heads, and this rank computes "
                f"{', '.join(map(str, sorted(self._heads)))} (tensor_parallel_degree={state.tp_size}). Prefix tuning "
                "and caches of a model that is not shared have such keys: set tensor_parallel_degree=1 for them; of "
                "PEFT's methods LoRA runs with tensor parallelism"
            )
