"""Adapters that wrap layers which `transform` has already sharded.

PEFT constructs an adapter around a layer, `base_layer`, from the layer's sizes, and then replaces the layer. torch's
module registration hook observes both steps. During construction the adapter holds a placeholder with the sizes of
the unsharded layer, so its parameters are complete and initialised as without tensor parallelism. After the
replacement it gets the sharded layer, and `adapters.py` shards the adapter.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker.state_handler import state
from smddp.sagemaker.tensor_parallel import input_check, share, styles
from smddp.sagemaker.tensor_parallel.adapters import BASE, COMPLETE, Adapted
from smddp.sagemaker.tensor_parallel.loading import accept_whole_values
from smddp.sagemaker.tensor_parallel.modules import READ_LOCAL
from smddp.sagemaker.tensor_parallel.regions import TensorGroup
from smddp.sagemaker.tensor_parallel.replicated import WHOLE, hold_whole
from smddp.sagemaker.tensor_parallel.shards import NAME
from smddp.sagemaker.tensor_parallel.state_dict import translate_state_dict_to_hf

# Attribute of PEFT's adapter of single rows of an embedding or head (trainable_token_indices).
_ROWS = "trainable_tokens_delta"
# Attribute of a placeholder: the layer.
_STANDS_FOR = "_tp_stands_for"


def on_registration(parent: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
    """torch's hook: ``module`` becomes ``name`` of ``parent``. Returns what does so instead; None for itself."""
    if module is None or parent._modules.get(name) is module:  # FSDP1 puts again what is there
        return None
    if name == BASE:
        return _placeholder(module) if _is_shared(module) else None
    stand_in = vars(module).get("_modules", {}).get(BASE)
    if stand_in is not None and _STANDS_FOR in vars(stand_in):
        _complete(module, vars(stand_in)[_STANDS_FOR])
    elif COMPLETE in vars(parent) and name not in parent._modules:
        raise NotImplementedError(
            f"adapter {name!r} is added to layers whose adapters are shared by tensor_parallel_degree={state.tp_size} "
            "ranks already: several adapters run where the model has all of them before transform()"
        )
    return None


def _is_shared(module: nn.Module) -> bool:
    """Returns True if `transform` sharded ``module``. Raises ValueError if FSDP has wrapped it since."""
    if styles.shared(module) is None and WHOLE not in vars(module):
        return False
    assert state.mesh is not None  # nothing is shared before `init`
    meshes = [p.device_mesh if isinstance(p, DTensor) else None for p in module.parameters(recurse=False)]
    if meshes and all(mesh == state.mesh["tensor"] for mesh in meshes):
        return True
    raise ValueError(
        f"an adapter for a {type(module).__name__} that FSDP has already wrapped, so FSDP would not manage it: call "
        "transform(), get_peft_model() and FSDP in this order"
    )


def _placeholder(layer: nn.Module) -> nn.Module:
    """Returns a module of the class and the original sizes of ``layer``, without values."""
    found = copy.copy(layer)
    vars(found).update(_parameters={}, _modules={})
    shapes = {name: torch.empty(p.shape, device="meta") for name, p in layer.named_parameters(recurse=False)}
    for name, parameter in translate_state_dict_to_hf(layer, shapes).items():
        found.__dict__[name] = _Absent.of(parameter.shape, layer.get_parameter(name))
    for name in layer._parameters:
        found.__dict__.setdefault(name, None)
    found.__dict__[_STANDS_FOR] = layer
    return found


class _Absent(torch.Tensor):
    """Tensor with a shape, dtype and device only."""

    @classmethod
    def of(cls, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of ``shape`` without memory, with the dtype and device of ``like``."""
        return torch.empty((), dtype=like.dtype, device=like.device).expand(shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allowed = ("__get__", "size", "dim", "numel", "is_floating_point", "is_complex")
        if func.__name__ not in allowed and func != torch.Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
            raise NotImplementedError(
                f"an adapter that reads the layer it is for ({func.__name__}), as DoRA's magnitudes and initial values "
                "by PiSSA or OLoRA do, after transform(): no rank of a tensor group holds the whole layer. Make LoRA's "
                "adapters with init_lora_weights=True or 'gaussian' and without DoRA, or before transform()"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def _complete(adapter: nn.Module, layer: nn.Module) -> None:
    """Set ``layer`` in ``adapter``, and shard the adapter over the layer's tensor group. Collective over the group."""
    assert state.mesh is not None  # nothing is shared before `init`
    if hasattr(adapter, _ROWS):
        raise NotImplementedError(
            f"{layer.__dict__.get(NAME) or type(layer).__name__}: trainable_token_indices after transform() with "
            f"tensor_parallel_degree={state.tp_size}: the adapter reads rows of a weight that is a DTensor. Call "
            "get_peft_model() before transform(), with a layer that the plan leaves whole"
        )
    shared = styles.shared(layer)
    tp = TensorGroup(state.mesh["tensor"])
    adapted = Adapted(shared.name.removesuffix(f".{BASE}"), adapter, shared.style) if shared is not None else None
    adapter._modules[BASE] = layer
    if share.broadcast_if_different(adapter, tp):
        warnings.warn(
            "adapters differed within a tensor group, as after making them without a common seed; all its ranks have "
            "the first one's values now",
            stacklevel=2,
        )
    if adapted is not None:
        adapted.apply()
        for part, border in adapted.borders.items():
            border.attach(adapter.get_submodule(part))
    hold_whole(adapter, tp, READ_LOCAL)
    input_check.mark_checked(adapter)
    accept_whole_values(adapter)
