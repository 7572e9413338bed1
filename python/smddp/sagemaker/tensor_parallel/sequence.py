"""Sequence parallelism: between the blocks of a layer, activations are shards of the sequence (dimension 1).

Norms, residuals and dropouts then work on their part only, and need that part's memory. Each all-reduce of a block
becomes an all-gather before and a reduce-scatter after it, which moves the same bytes. Parameters outside blocks
(norms, biases after the sum) see a part of the sequence only, so their gradients are summed: one small all-reduce per
layer, of all of them together. Before the first layer and after the last, activations are whole. So they are throughout
where nothing is trained and the sequence does not divide, as when tokens are generated one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker import hf
from smddp.sagemaker.rng import RegionRandomness
from smddp.sagemaker.tensor_parallel import modules
from smddp.sagemaker.tensor_parallel.border import Block, is_random
from smddp.sagemaker.tensor_parallel.mixins import extend
from smddp.sagemaker.tensor_parallel.regions import (
    SEQUENCE,
    TensorGroup,
    gather_sequence,
    gather_whole_sequence,
    shard_sequence,
)


def check(model: nn.Module) -> None:
    """Raises NotImplementedError for a family without support of sequence parallelism."""
    if hf.model_type(model) not in hf.SEQUENCE_PARALLEL:
        raise NotImplementedError(
            f"sequence_parallel: the layers of {type(model).__name__} are not known to work on a part of the "
            f"sequence; these are: {', '.join(hf.SEQUENCE_PARALLEL)}"
        )


def apply(layers: list[nn.Module], blocks: dict[str, Block], owners: dict[str, nn.Module], seed: int) -> None:
    """Put the borders of the sequence into ``layers``; ``owners``: the module that holds each of ``blocks``."""
    inner = {id(owners[name]): block for name, block in blocks.items() if block.sequence}
    # Adapters have separate blocks inside the sequence's blocks.
    handled = {(id(partial), name) for block in blocks.values() for partial, name in block.partial}
    for layer in layers:
        tp: TensorGroup | None = None
        for module in layer.modules():
            if id(module) in inner:
                block = inner[id(module)]
                tp = block.tp
                module.register_forward_pre_hook(_OnInput(tp, gather_sequence), with_kwargs=True)
        if tp is not None:
            _outside_blocks(layer, tp, inner, handled, seed)
    first, last = layers[0], layers[-1]
    tp = next(iter(inner.values())).tp
    first.register_forward_pre_hook(_OnInput(tp, shard_sequence), with_kwargs=True, prepend=True)
    last.register_forward_hook(_GatherOutput(tp))


def _outside_blocks(
    layer: nn.Module, tp: TensorGroup, inner: dict[int, Block], handled: set[tuple[int, str]], seed: int
) -> None:
    """Puts parameters that see only a part of the sequence across a separate border of the layer."""
    outer = Block(tp)
    for module in layer.modules():
        if id(module) in inner:
            inner[id(module)].outer = outer
        names = [
            name
            for name, parameter in module._parameters.items()
            if parameter is not None and not isinstance(parameter, DTensor) and (id(module), name) not in handled
        ]
        if not names:
            continue
        outer.partial += [(module, name) for name in names]
        if isinstance(module, modules.Row):
            module._tp_outer = outer
        else:
            partial = extend(module, modules.Partial)
            partial._tp_block, partial._tp_names = outer, tuple(names)
    outer.attach(layer)
    if is_random(layer):
        outer.randomness = RegionRandomness(seed, tp.rank)
        layer.register_forward_pre_hook(_Enter(outer), with_kwargs=True)


class _OnInput:
    """Forward pre-hook that passes a module's activations, its first argument, over a border."""

    def __init__(self, tp: TensorGroup, border: Any) -> None:
        self._tp, self._border = tp, border

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (self._over(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._over(kwargs["hidden_states"])}

    def _over(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._border is shard_sequence:
            self._tp.shared_input.check_equal(tensor, "the first layer")
            self._choose(tensor.shape[SEQUENCE])
        return tensor if self._tp.keeps_sequence else self._border(tensor, self._tp)

    def _choose(self, length: int) -> None:
        """Decide if this pass shards its sequence; an indivisible length stays unsharded in evaluation."""
        self._tp.keeps_sequence = bool(length % self._tp.size)
        if length % self._tp.size and not self._tp.keeps_sequence:
            raise ValueError(
                f"sequence_parallel: a sequence of {length} does not divide by tensor_parallel_degree={self._tp.size}: "
                f"pad it to {-(-length // self._tp.size) * self._tp.size}"
            )


class _GatherOutput:
    def __init__(self, tp: TensorGroup) -> None:
        self._tp = tp

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        if self._tp.keeps_sequence:
            return output
        if isinstance(output, tuple):
            return (gather_whole_sequence(output[0], self._tp), *output[1:])
        return gather_whole_sequence(output, self._tp)


class _Enter:
    """Forward pre-hook that switches to rank-specific random numbers for a layer's part of the sequence."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if module.training:
            activations = args[0] if args else kwargs["hidden_states"]
            randomness = self._block.randomness
            assert randomness is not None  # this hook is for blocks that have it
            randomness.enter(activations.device)
