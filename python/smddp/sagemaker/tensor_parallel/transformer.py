"""Marker classes of transformed models and their decoder layers.

Scripts name them in wrap policies and `check_fn`s:

    >>> transformer_auto_wrap_policy(transformer_layer_cls={TETransformerLayer})

`transform` mixes them into the model's own classes, so that a transformed `LlamaDecoderLayer` is still one.
"""

from __future__ import annotations

from torch import nn

from smddp.sagemaker.tensor_parallel.mixins import extend

__all__ = ["TETransformerLayer", "TransformerLMHead", "TransformerLayer"]


class TransformerLayer(nn.Module):
    """A decoder layer of a transformed model."""


class TETransformerLayer(TransformerLayer):
    """The name of `TransformerLayer` since SMP 2.2; every decoder layer is an instance of both."""


class TransformerLMHead(nn.Module):
    """A transformed model."""


def mark(model: nn.Module, layers: list[nn.Module]) -> None:
    """Make ``layers`` instances of `TETransformerLayer` and ``model`` one of `TransformerLMHead`."""
    for layer in layers:
        extend(layer, TETransformerLayer, first=False)
    extend(model, TransformerLMHead, first=False)
