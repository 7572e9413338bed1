"""Values that only a constructor sets: buffers, and parameters that no initialisation function writes.

A model on the meta device has lost them (rotary frequencies, causal masks, embedding scales). They come back from a
second construction of the same class from the same config, whose parameters go to meta as they are registered: it
holds real buffers and, for a moment each, one parameter.
"""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from smddp.sagemaker.delayed_param import seeds


def rebuild(model: nn.Module, keep: set[tuple[type, str]], seed: int) -> nn.Module:
    """Constructs ``type(model)(model.config)`` on the CPU with real buffers and only the parameters in ``keep``.

    ``keep`` holds (class of the owning module or one derived from it, parameter name). Raises `ValueError` where the
    class cannot be constructed from its config.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        if any(name == kept and issubclass(owner, type(module)) for owner, kept in keep):
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch registers the hook's return value, if not None, instead of the parameter.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))
            stack.enter_context(seeds.seeded(torch.device("cpu"), seed, "constructor"))
            return type(model)(copy.deepcopy(model.config))
    except TypeError as error:
        raise ValueError(
            f"{type(model).__name__}(config) would set them, but fails: {error}. Construct the model with real "
            "buffers: accelerate's init_empty_weights keeps them"
        ) from error
    finally:
        hook.remove()
