"""Region border that the sharded modules of one attention or MLP block share.

q, k and v (or gate and up) read the same activations. With separate borders, each would all-reduce its input's
gradient; a shared border sums the gradients first and all-reduces once. The first module that reads an activation
creates the border, and the other modules reuse it. Replicated parameters with partial use (norms of heads, few key and
value heads) cross the same border, so the same all-reduce reduces their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from smddp.sagemaker.rng import RegionRandomness
from smddp.sagemaker.tensor_parallel.regions import TensorGroup, copy_to_region
from smddp.sagemaker.tensor_parallel.shards import local

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Block:
    """Border of one block; releases the activations when the block's forward ends.

    Attributes:
        tp: the tensor group.
        name: of the module that holds the sharded ones.
        partial: (module, parameter name) of each replicated parameter that ranks use in part.
        randomness: this rank's random numbers inside the region; None without random operations inside.
        sequence: activations outside are shards of the sequence; `sequence.py` puts the border before the block.
        outer: with ``sequence``, the layer's border for parameters outside its blocks.
        open: the region continues outside the block, without a border.
    """

    def __init__(self, tp: TensorGroup, sequence: bool = False, name: str = "") -> None:
        self.tp = tp
        self.name = name
        self.sequence = sequence
        self.outer: Block | None = None
        self.open = False
        self.partial: list[tuple[nn.Module, str]] = []
        self.randomness: RegionRandomness | None = None
        self._seen: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._aliases: dict[tuple[int, str], torch.Tensor] = {}

    def attach(self, owner: nn.Module) -> None:
        """Forget after each forward of ``owner``, the module that holds the sharded ones."""
        # always_call: a recomputation under checkpointing may stop in the middle by an exception.
        owner.register_forward_hook(_Forget(self), always_call=True)

    def enter(self, tensor: torch.Tensor, training: bool) -> torch.Tensor:
        """``tensor``, which is equal on all ranks, for use inside the region."""
        if training and self.randomness is not None:
            self.randomness.enter(tensor.device)
        if self.open or self.sequence:
            return tensor
        self.tp.shared_input.check_equal(tensor, self.name)
        if not torch.is_grad_enabled():
            return tensor  # nothing comes back over the border
        if self._seen is not None:
            seen, version, alias = self._seen
            if seen is tensor and version == _version(tensor):
                return alias
        (alias,) = self._cross(tensor)
        self._seen = (tensor, _version(tensor), alias)
        return alias

    def parameter(self, module: nn.Module, name: str) -> torch.Tensor:
        """A parameter of `partial` for use inside the region."""
        key = (id(module), name)
        if key not in self._aliases:
            self._cross()
        return self._aliases[key]

    def leave(self) -> None:
        """Random numbers are the same on all ranks again."""
        if self.randomness is not None:
            self.randomness.leave()

    def forget(self) -> None:
        self.leave()
        self._seen, self._aliases = None, {}

    def _cross(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Takes ``tensors``, and the partial parameters if they have not crossed yet, over one border."""
        partial = [] if self._aliases else self.partial
        # Projections of the block have checked that FSDP has gathered its unit; FSDP1 may hold norms as parameters.
        inputs = (*tensors, *(local(getattr(module, name)) for module, name in partial))
        if not inputs:
            return ()
        aliases = copy_to_region(self.tp, *inputs)
        for (module, name), alias in zip(partial, aliases[len(tensors) :]):
            self._aliases[id(module), name] = alias
        return aliases[: len(tensors)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None, "_aliases": {}}


def _version(tensor: torch.Tensor) -> int:
    """Returns the tensor's in-place version; 0 in a compiled graph, where each write creates a new value."""
    return 0 if torch.compiler.is_compiling() else tensor._version


class _Forget:
    def __init__(self, block: Block) -> None:
        self._block = block

    def __call__(self, *_: Any) -> None:
        self._block.forget()


def is_random(owner: nn.Module) -> bool:
    """Returns True if ``owner`` contains dropout: a module with p > 0, or a rate that it passes on."""
    for module in owner.modules():
        if isinstance(module, _DROPOUTS) and module.p > 0:
            return True
        if any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
