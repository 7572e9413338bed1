"""Modules: a layer norm, and transformer layers that the ranks of a tensor group share."""

from smddp.modelparallel.tensor.layers import DistributedEmbedding, DistributedLinear, DistributedModule
from smddp.modelparallel.tensor.transformer import (
    DistributedAttentionLayer,
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerLMHead,
    DistributedTransformerOutputLayer,
    FlashAttentionLayer,
)
from smdistributed.modelparallel.torch.nn import huggingface
from torch.nn import LayerNorm as _LayerNorm


class FusedLayerNorm(_LayerNorm):
    """torch's LayerNorm, which is fused where torch has a kernel."""


__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]
