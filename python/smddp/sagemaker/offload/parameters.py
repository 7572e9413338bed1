"""Storages of parameters and buffers, which are not offloaded, nor are their views."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from smddp.sagemaker.private_names import FLAT_PARAMETER_DATA, handle_of, storage_key


def parameter_storages(module: torch.nn.Module, recurse: bool = True) -> set[int]:
    """Returns the keys of all storages with parameters or buffers of ``module``, sharded or gathered."""
    tensors = [t for owner in (module.parameters(recurse), module.buffers(recurse)) for t in owner]
    for each in module.modules() if recurse else [module]:
        if isinstance(each, FullyShardedDataParallel):
            tensors += _flat_parameter_data(each)
    return {storage_key(getattr(t, "_local_tensor", t)) for t in tensors}


def _flat_parameter_data(module: FullyShardedDataParallel) -> Iterator[torch.Tensor]:
    handle = handle_of(module)
    if handle is not None:
        for name in FLAT_PARAMETER_DATA:
            data = getattr(handle.flat_param, name, None)
            if isinstance(data, torch.Tensor):
                yield data
