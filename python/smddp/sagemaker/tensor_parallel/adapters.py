"""Low-rank adapters (PEFT's LoRA) of projections that a plan shares.

An adapter adds B(A(x)) to what its projection makes of x, with A (r, in) and B (out, r). (Hu et al., *LoRA: Low-Rank
Adaptation of Large Language Models*, 2021.)

    the projection's         A                                B
    columns are shared       whole, inside the region         its columns shared as the projection's
    rows are shared          its rows shared, then the sum    whole, outside of the region
    output is gathered       whole, outside of the region     whole, outside of the region

So no rank holds more of an adapter than its part of the projection needs, and a forward pass sums r numbers a token
more where rows are shared. Adapters that come after `transform` are shared in `adapter_hooks.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from smddp.sagemaker.rng import RegionRandomness
from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel import styles
from smddp.sagemaker.tensor_parallel.border import Block
from smddp.sagemaker.tensor_parallel.mixins import Mixin, extend

# Attribute name of an adapter's projection.
BASE = "base_layer"
# Attribute of an adapter's parts, which hold a module for each of PEFT's adapters, once these are shared.
COMPLETE = "_tp_complete"


def base_of(module: nn.Module) -> nn.Module | None:
    """Returns the projection that ``module`` adapts; None for other modules."""
    base = getattr(module, BASE, None)
    return base if isinstance(base, nn.Module) else None


def whole_model(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's wrapper around all of it."""
    inside = getattr(model, "get_base_model", None)
    return inside() if callable(inside) else model


def refuse_outside(model: nn.Module, inside: nn.Module) -> None:
    """Raise NotImplementedError for parameters of PEFT's wrapper, such as prompts, which would not be sharded."""
    known = {id(parameter) for parameter in inside.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if outside:
        raise NotImplementedError(
            f"{type(model).__name__}: {outside[0]} is outside the model that transform() shares; of PEFT's "
            "methods LoRA runs with tensor parallelism, for others set tensor_parallel_degree=1"
        )


class Adapted:
    """Sharding of the adapter of one sharded projection.

    Attributes:
        borders: separate blocks of the adapter, by the submodule that holds them.

    Raises:
        NotImplementedError: an unsupported kind of adapter.
    """

    def __init__(self, name: str, module: nn.Module, base: styles.Style) -> None:
        self._name, self._module, self._block = name, module, base.block
        self._rows = isinstance(base, styles.Rowwise)
        self._styles: dict[str, ParallelStyle] = {}
        self.borders: dict[str, Block] = {}
        inputs, outputs = _linears(module, "lora_A"), _linears(module, "lora_B")
        self._dropouts = [child for child in _members(module, "lora_dropout").values() if getattr(child, "p", 0.0) > 0]
        columns = isinstance(base, styles.KeyValue) or type(base) is styles.Colwise
        if (
            not inputs
            or not outputs
            or not (columns or self._rows)
            or _more(module)
            or (self._dropouts and self._block.sequence)
            or self._block.open
        ):
            raise NotImplementedError(
                f"{name} is a {type(module).__module__}.{type(module).__name__} around a layer that the plan shares: "
                "of adapters, LoRA's of linear layers runs (lora_A and lora_B), without DoRA, not of single experts, "
                "and under sequence_parallel without lora_dropout. Train this model with tensor_parallel_degree=1, "
                "where FSDP shards it, or give such adapters only to modules that the plan leaves whole"
            )
        if isinstance(base, styles.Rowwise):
            self._styles.update({part: styles.Rowwise(self._block, split=base.split) for part, _ in inputs})
            if self._block.outer is not None:
                self._styles.update({part: styles.InRegion(self._block.outer) for part, _ in outputs})
            self._rows = not base.split
        elif isinstance(base, styles.Colwise) and base.gather:
            self._dropouts = []  # outside of any region, as the adapter is
        else:
            for part, linear in inputs:
                # Dropout changes the adapter's input, so the adapter needs a separate border.
                border = self._border(part) if self._dropouts else self._block
                self._styles[part] = styles.KeyValue(border, [0], linear.weight.shape[0])
            self._styles.update({part: self._columns(part, base) for part, _ in outputs})

    def apply(self) -> None:
        """Share A and B, and let dropouts of whole activations draw the same on all ranks, and those of a rank's
        columns its own."""
        if self._styles:
            parallelize_module(self._module, self._block.tp.mesh, self._styles)
        if self._dropouts and self._block.randomness is None:  # nothing in the block was random before
            self._block.randomness = RegionRandomness(state.random_seed, self._block.tp.rank)
        for dropout in self._dropouts:
            extend(dropout, Dropout)
            dropout.__dict__.update(_tp_block=self._block, _tp_inside=self._rows)
        for part in ("lora_A", "lora_B"):
            vars(self._module.get_submodule(part))[COMPLETE] = True

    def _border(self, part: str) -> Block:
        self.borders[part] = Block(self._block.tp, name=self._name)
        return self.borders[part]

    def _columns(self, part: str, base: styles.Style) -> ParallelStyle:
        """A style that cuts columns as ``base`` does, of a module whose input is inside the region already."""
        block = self._border(part)
        block.open = True
        if isinstance(base, styles.KeyValue):
            return styles.KeyValue(block, base.heads, base.head_dim)
        assert isinstance(base, styles.Colwise)
        return styles.Colwise(block, parts=base.parts)


class Dropout(Mixin):
    """A dropout in front of an adapter, between the projections of a block that draws its own numbers."""

    _tp_block: Block
    _tp_inside: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        randomness = self._tp_block.randomness
        if randomness is None or not self.training:
            return super().forward(x)
        if self._tp_inside:
            randomness.enter(x.device)
        else:
            randomness.leave()
        dropped: torch.Tensor = super().forward(x)
        if self._tp_inside:
            randomness.leave()
        else:
            randomness.enter(x.device)
        return dropped


def _more(module: nn.Module) -> bool:
    """Returns True if an adapter has parameters besides A and B, such as DoRA's magnitudes."""
    parts = [child for name, child in module.named_children() if name.startswith("lora_")]
    own = {id(p) for name in ("lora_A", "lora_B") for p in getattr(module, name, nn.Module()).parameters()}
    return any(id(p) not in own for part in parts for p in part.parameters())


def _members(module: nn.Module, part: str) -> dict[str, nn.Module]:
    """A part of an adapter by name: one module, or one for each of PEFT's adapters."""
    found = getattr(module, part, None)
    if isinstance(found, nn.ModuleDict):
        return {f"{part}.{adapter}": child for adapter, child in found.items()}
    return {part: found} if isinstance(found, nn.Module) else {}


def _linears(module: nn.Module, part: str) -> list[tuple[str, nn.Linear]]:
    return [(name, child) for name, child in _members(module, part).items() if isinstance(child, nn.Linear)]
