"""The matrix product of sharded projections: its type, and parameters that a call substitutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

# (activations (..., in), weight (out, in), bias (out,) or None) -> (..., out)
Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]


@contextlib.contextmanager
def substituted(module: nn.Module, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """``module`` with ``tensors`` in place of its parameters of these names."""
    # FSDP1 keeps parameters as plain attributes while it computes, some in both places; the attribute counts.
    kept = {name: module.__dict__[name] for name in tensors if name in module.__dict__}
    try:
        module.__dict__.update(tensors)
        yield
    finally:
        for name in tensors:
            del module.__dict__[name]
        module.__dict__.update(kept)
