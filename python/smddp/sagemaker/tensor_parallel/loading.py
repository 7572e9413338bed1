"""`load_state_dict` of whole values into a model that `transform` has shared."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker import dtensor_shards
from smddp.sagemaker.tensor_parallel.shards import RELAID

# Module attribute: set once `_cut_values` is a hook of the module.
_CUTS = "_tp_cuts"


def accept_whole_values(model: nn.Module) -> None:
    """Let `load_state_dict` of ``model`` and of modules in it take plain tensors with Hugging Face's names and shapes.

    Every rank passes the whole values, and keeps its part.
    """
    for module in model.modules():
        if (module._parameters or RELAID in vars(module)) and _CUTS not in vars(module):
            module.__dict__[_CUTS] = True
            module.register_load_state_dict_pre_hook(_cut_values)


def _cut_values(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """torch's hook: replace plain tensors that ``module`` is about to load by DTensors of its parts."""
    records = vars(module).get(RELAID, {}).values()
    names = {*module._parameters, *(name for record in records for name in record.sources)}
    found = {name: state_dict.get(prefix + name) for name in names}
    whole = {name: value for name, value in found.items() if _is_plain(value)}
    ours = dict(whole)
    for record in records:
        stored_already = any(prefix + name in state_dict for name in set(record.stored) - set(record.sources))
        if not stored_already and all(name in ours for name in record.sources):
            parts = record.split_all(*(ours.pop(name) for name in record.sources))
            ours.update(zip(record.stored, parts))
    for name in whole.keys() - ours.keys():
        del state_dict[prefix + name]
    for name, value in ours.items():
        parameter = module._parameters.get(name)
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            state_dict[prefix + name] = dtensor_shards.around(
                dtensor_shards.cut(value, parameter).to(parameter.device), parameter
            )


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
