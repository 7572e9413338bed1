"""`smp.nn.Distributed*`: plain modules that are shared wherever they are made.

In one process, and before `DistributedModel`, they hold and compute everything. Sizes are those of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp.modelparallel.tensor.marks import MARK
from smddp.modelparallel.tensor.split import split_of

# Attribute of a transformers module: names of the classes of `smp.nn` whose place it takes.
KIND = "_smp_kind"


class Kind(type):
    """`isinstance` also holds for a shared module of the plain class, and for modules that `naming` has named."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        if cls.__name__ in getattr(instance, "__dict__", {}).get(KIND, "").split():
            return True
        plain = cls.__dict__.get("_plain")
        return plain is not None and isinstance(instance, plain) and split_of(instance.weight) is not None


class DistributedModule(nn.Module, metaclass=Kind):
    """Replacement of other modules by `tp_register`: it is shared wherever it is created."""

    def shared(self) -> None:
        """Mark this module and all in it; to be called at the end of ``__init__``."""
        for module in self.modules():
            module.__dict__[MARK] = module.__dict__.get(MARK) or {}


class DistributedLinear(nn.Linear, DistributedModule):
    """`torch.nn.Linear`, whose output features are shared, or its input features where those do not divide."""

    _plain = nn.Linear

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__(in_features, out_features, bias, **options)
        self.shared()


class DistributedEmbedding(nn.Embedding, DistributedModule):
    """`torch.nn.Embedding`, whose rows are shared."""

    _plain = nn.Embedding

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        initializer_range: float | None = None,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight
        )
        if initializer_range is not None and _weight is None:
            nn.init.normal_(self.weight, std=initializer_range)
        self.shared()
