"""Delayed initialization: parameters are created on the meta device and initialized on their ranks only.

With several stages, each stage initializes its parameters at the cut. With sharded data parallelism or one stage, it
happens one module at a time when the model is wrapped. The values depend only on torch's seed on rank 0 and on names,
not on the cut or the sharding. `torch.sagemaker.delayed_param` computes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from smddp.modelparallel.pipeline.placed_tensor import Form
from smddp.modelparallel.tensor.split import REPLACED

log = logging.getLogger("smddp.modelparallel")


@contextlib.contextmanager
def creation() -> Iterator[None]:
    """Move parameters of modules created inside to the meta device at registration. Buffers are real."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        before = module._parameters.get(name)
        if before is not None and before.is_meta:
            return None  # a loaded value has replaced the parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch registers the result of the hook, unless it is None, as the parameter.
    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def pending(module: nn.Module) -> bool:
    """Return True if parameters of the module have no values yet."""
    return any(parameter.is_meta for parameter in module.parameters())


def agreed_seed(module: nn.Module, asked: bool) -> int:
    """Return the seed of the initial values: torch's seed on rank 0. Collective if parameters have no values yet.

    Args:
        asked: whether the key ``delayed_parameter_initialization`` is set.
    """
    if not pending(module):
        if asked:
            log.warning(
                "'delayed_parameter_initialization' has no effect: make the model inside "
                "smp.delay_param_initialization(), so that its parameters wait for their values"
            )
        return 0
    box = [torch.initial_seed()]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _initer(module: nn.Module, seed: int) -> Any:
    from smddp.sagemaker.delayed_param import DelayedParamIniter

    return DelayedParamIniter(module, random_seed=seed, device=_device())


def _device() -> torch.device:
    from smddp.sagemaker.parallel import device_type

    kind = device_type()
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def everywhere(module: nn.Module, seed: int) -> None:
    """Initialize all parameters; with sharding a rank keeps only its piece."""
    if pending(module):
        before = dict(module.named_parameters(remove_duplicate=False))
        initer = _initer(module, seed)
        with initer.validate_params_and_buffers_inited():
            initer.materialize()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                before[name].__dict__[REPLACED] = parameter


def here(module: nn.Module, seed: int, own: set[int]) -> None:
    """Initialize the parameters whose ids are in ``own`` in place, as optimizers and scripts hold them."""
    if not pending(module):
        return
    initer = _initer(module, seed)
    waiting = [q for q in module.parameters() if q.is_meta and id(q) in own]
    users = {
        id(q): [(each, key) for each in module.modules() for key, other in each._parameters.items() if other is q]
        for q in waiting
    }
    make = initer.get_param_init_fn()
    for each, _ in {id(each): (each, key) for used in users.values() for each, key in used}.values():
        make(each)
    for parameter in waiting:
        first, name = users[id(parameter)][0]
        made = first._parameters[name]
        assert made is not None  # as `make` has put it there
        torch.utils.swap_tensors(parameter, made)
        for each, key in users[id(parameter)]:
            each._parameters[key] = parameter


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """Replace meta parameters of other stages by empty ones on the device of the others; some models read it."""
    device = None
    for parameter in parameters:
        if parameter.is_meta:
            device = device or _device()
            empty = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
            torch.utils.swap_tensors(parameter, empty)


def form_of(parameter: nn.Parameter) -> Form:
    """Return the form of a parameter on its stage."""
    form = Form.of(parameter)
    return replace(form, device=_device().type) if parameter.is_meta else form
