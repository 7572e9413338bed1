"""Memory for parameters and placement of buffers, for example in FSDP's ``param_init_fn``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def empty_module_params(
    module: nn.Module, device: torch.device | str | int | None = None, recurse: bool = False
) -> nn.Module:
    """Give ``module`` new, uninitialised parameters of the same shape, dtype and requires_grad; keep buffers.

    Args:
        module: changed in place.
        device: target device; None: each parameter's device.
        recurse: include the submodules' parameters.

    Returns ``module``. Shared parameters remain shared. Attributes of a parameter are copied to the new parameter.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner in _modules(module, recurse):
        for name, old in owner._parameters.items():
            if old is None:
                continue
            if old not in made:
                with torch.no_grad():
                    made[old] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
                made[old].__dict__.update(old.__dict__)
            owner._parameters[name] = made[old]
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device | str | int, recurse: bool = False) -> nn.Module:
    """Move the buffers of ``module``, and of its submodules if ``recurse``, to ``device``; keep parameters.

    Returns ``module``, changed in place. Raises ValueError for a buffer on the meta device, which has no values.
    """
    found = [(o, name, b) for o in _modules(module, recurse) for name, b in o._buffers.items() if b is not None]
    for owner, name, buffer in found:
        if buffer.is_meta and torch.device(device).type != "meta":
            raise ValueError(
                f"buffer {name!r} of {type(owner).__name__} is on the meta device and has no values to move to "
                f"{device}: compute it there first (DelayedParamIniter does)"
            )
    for owner, name, buffer in found:
        owner._buffers[name] = buffer.to(device)
    return module


def _modules(module: nn.Module, recurse: bool) -> Iterable[nn.Module]:
    return module.modules() if recurse else (module,)
