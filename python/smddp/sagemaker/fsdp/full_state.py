"""FSDP1's full state dicts in Hugging Face names and shapes, also where tensor parallelism has changed them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from smddp.formats import exact
from smddp.sagemaker.tensor_parallel.state_dict import tied_names, translate_state_dict_to_hf

# Wrapper prefixes between the saved model and FSDP's root.
_ROOT = re.compile(r"((_checkpoint_wrapped_module|_orig_mod|module)\.)*")


@exact()
def whole(tensor: Any) -> Any:
    """Returns the full tensor, on the device of ``tensor``. Collective over its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    home, mesh = tensor.device, tensor.device_mesh
    if home.type != mesh.device_type:
        local = tensor.to_local().to(mesh.device_type)
        tensor = DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.full_tensor().to(home)


def translate_full_state_dict(model: nn.Module, state_dict: dict[str, Any], rank0_only: bool = False) -> dict[str, Any]:
    """Converts the result of ``model.state_dict()`` under FULL_STATE_DICT to the format of `from_pretrained`.

    Gathers tensor-parallel tensors one by one, so all ranks with a non-empty dictionary must call this. With
    ``rank0_only``, only global rank 0 keeps the result.
    """
    keep = not rank0_only or not dist.is_initialized() or dist.get_rank() == 0
    gathered: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        value = whole(tensor)
        if keep:
            gathered[name] = value
    return translate_state_dict_to_hf(model, gathered) if gathered else gathered


def config_init(original: Callable[..., None]) -> Callable[..., None]:
    """`FullStateDictConfig.__init__` that takes ``translate_on_save`` too."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, translate_on_save: bool = True, **kwargs: Any) -> None:
        if type(translate_on_save) is not bool:
            raise TypeError(f"translate_on_save must be a bool, got {translate_on_save!r}")
        original(self, *args, **kwargs)
        self.translate_on_save = translate_on_save

    return __init__


def fsdp_state_dict(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wraps `FullyShardedDataParallel.state_dict`: converts the root's full state dicts and includes all tied names."""

    @functools.wraps(original)
    def state_dict(self: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with exact():
            made = original(self, *args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        config = getattr(self, "_state_dict_config", None)
        kind = getattr(self, "_state_dict_type", None)
        if not _ROOT.fullmatch(prefix) or not any(isinstance(value, torch.Tensor) for value in made.values()):
            return made
        bare = {name.removeprefix(prefix): value for name, value in made.items()}
        if kind == StateDictType.FULL_STATE_DICT and getattr(config, "translate_on_save", True):
            translated = translate_full_state_dict(self, bare, getattr(config, "rank0_only", False))
        else:
            translated = bare | {name: bare[owner] for name, owner in tied_names(self) if owner in bare}
        # Modify the dictionary in place: a wrapper around FSDP fills it further.
        made.clear()
        made.update({prefix + name: value for name, value in translated.items()})
        return made

    return state_dict
