"""Matrix product of sharded projections: torch, or transformer-engine on request.

Parameters, shards and collectives do not depend on the choice; only the local product does. So tests of the torch
version cover the other one except for its kernels.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from smddp.sagemaker.tensor_parallel import modules
from smddp.sagemaker.tensor_parallel.product import Product, substituted
from smddp.sagemaker.tensor_parallel.shards import local


def _has_gpu() -> bool:
    return torch.cuda.is_available()


class LayerProvider(Protocol):
    """Chooses the product of each shared projection."""

    def product(self, weight: torch.Tensor, bias: bool) -> Product:
        """The product for a local ``weight`` (out, in), with a bias inside the region or not."""
        ...


class Plain:
    """torch's own product."""

    def product(self, weight: torch.Tensor, bias: bool) -> Product:
        return F.linear


class TransformerEngine:
    """transformer-engine's Linear, which runs in FP8 inside the script's `fp8_autocast`.

    Raises ImportError without the package, RuntimeError without a GPU.
    """

    def __init__(self) -> None:
        if not _has_gpu():
            raise RuntimeError('layers="transformer_engine" runs on GPUs only, and there is none: use "plain"')
        try:
            self._te = importlib.import_module("transformer_engine.pytorch")
        except ImportError as error:
            raise ImportError(
                f'layers="transformer_engine" needs the package transformer_engine[pytorch] ({error}): install it, or '
                'use "plain"'
            ) from error

    def product(self, weight: torch.Tensor, bias: bool) -> Product:
        rows, columns = weight.shape
        # The engine's parameters remain on meta: each call passes the shard that FSDP has just gathered.
        return _EngineProduct(self._te.Linear(columns, rows, bias=bias, params_dtype=weight.dtype, device="meta"))


class _EngineProduct:
    """Calls an engine's layer with external parameters; not a submodule, so the model does not own its parameters."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with substituted(self._layer, {"weight": weight} if bias is None else {"weight": weight, "bias": bias}):
            return self._layer(x)


def provider(name: str) -> LayerProvider:
    """The provider called "plain" or "transformer_engine". Raises as the latter does."""
    return TransformerEngine() if name == "transformer_engine" else Plain()


def use(model: nn.Module, chosen: LayerProvider) -> None:
    """Let every shared projection of ``model`` compute with ``chosen``."""
    if isinstance(chosen, Plain):
        return
    for module in model.modules():
        # Fused and transposed projections keep the plain product: their shard is not a separate (out, in) matrix.
        plain = type(module).forward in (modules.Column.forward, modules.Row.forward)
        if plain and isinstance(module, (modules.Column, modules.Row)) and not module._tp_transposed:
            weight = local(module.weight)
            if weight.dim() == 2:
                bias = module.bias is not None and isinstance(module, modules.Column)
                module._tp_product = chosen.product(weight, bias)
