"""Modules: a layer norm, and the names of the tensor-parallel ones, which raise when they are made."""

from smddp.modelparallel.creation import NotThere as _NotThere
from torch.nn import LayerNorm as _LayerNorm


class FusedLayerNorm(_LayerNorm):
    """torch's LayerNorm, which is fused where torch has a kernel."""


class DistributedLinear(_NotThere): ...


class DistributedTransformerLMHead(_NotThere): ...


class DistributedTransformer(_NotThere): ...


class DistributedTransformerLayer(_NotThere): ...


class DistributedAttentionLayer(_NotThere): ...


class DistributedTransformerOutputLayer(_NotThere): ...


class DistributedEmbedding(_NotThere): ...


class FlashAttentionLayer(_NotThere): ...


__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
]
