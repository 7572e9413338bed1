"""Workarounds for FSDP1's limitations with DTensor parameters.

- FSDP1 duplicates a DTensor parameter that two modules share. So, before wrapping, the second module gets a reference
  to the first module instead of the parameter.
- With use_orig_params=True and a shard group of one rank, FSDP1 creates new DTensor parameters after every pass, but
  the optimizer keeps the old ones. So the original parameters are kept and get the memory of the new views; their
  gradients are DTensors, too.
- After a backward pass in no_sync() with use_orig_params=True, gradients are full but parameters are sharded. It
  then assigns views through `.data`, which DTensors do not support. Plain parameters get plain views. The same applies
  to mixed precision, where the dtype of gradients differs.
- FSDP1 creates a DTensor for each view of a flat parameter, and the layer extracts the local tensor again: an eighth
  of a step of small layers. So layers get the plain views during computation.
- FSDP1 flattens the shard of a DTensor and always sets requires_grad. So frozen parameters are frozen again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from smddp.sagemaker.private_names import mark_flattened
from smddp.sagemaker.tensor_parallel.mixins import Mixin, extend, is_extended
from smddp.sagemaker.tensor_parallel.replicated import as_read

# Training states of FSDP1's handles in which layers compute.
_COMPUTING = ("FORWARD", "BACKWARD_PRE")
# Module attribute: {parameter name: (the module that has it, its name there)}.
REFERENCES = "_tp_references"


class Tied(Mixin):
    """A module some of whose parameters are another module's."""

    def __getattr__(self, name: str) -> Any:
        owner = self.__dict__.get(REFERENCES, {}).get(name)
        return as_read(getattr(*owner), self, name) if owner is not None else super().__getattr__(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # State dicts hold the tied names too; the first module loads the values.
        for name in self.__dict__.get(REFERENCES, {}):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def refer_to_first(model: nn.Module) -> None:
    """Keeps shared DTensor parameters in the first module; other modules get a reference to it."""
    first: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            owner = first.setdefault(id(parameter), (module, name))
            if owner != (module, name):
                del module._parameters[name]
                module.__dict__.setdefault(REFERENCES, {})[name] = owner
                if not isinstance(module, Tied):  # a head may share its weight with one and its bias with another
                    extend(module, Tied)


def restore_frozen(original: Callable[..., None]) -> Callable[..., None]:
    """`FlatParamHandle._init_flat_param_and_metadata` that keeps frozen DTensor parameters frozen."""

    @functools.wraps(original)
    def _init_flat_param_and_metadata(
        self: Any, params: list[nn.Parameter], module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        frozen = {
            (id(owner), name)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if isinstance(parameter, DTensor) and not parameter.requires_grad
        }
        original(self, params, module, *args, **kwargs)
        # Without original parameters FSDP1 freezes a unit as a whole, or rejects it.
        for (name, owner, _), parameter in zip(self.flat_param._param_infos, self.flat_param._params or ()):
            if (id(owner), name) in frozen:
                parameter.requires_grad_(False)

    return _init_flat_param_and_metadata


def _computes_on_local(handle: Any) -> bool:
    """Returns True if all modules of a flat parameter accept local tensors; those of `parallelize_module` do not."""
    found: bool | None = getattr(handle, "_tp_computes_on_local", None)
    if found is None:
        flat = handle.flat_param
        places = zip(flat._param_infos, flat._param_extensions)
        found = all(is_extended(module) for (_, module, _), extension in places if extension is not None)
        handle._tp_computes_on_local = found
    return found


def reuse_parameters(original: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    """`FlatParamHandle._use_unsharded_views` that keeps DTensor parameters of unsharded units as they are, and gives
    layers plain views to compute with."""

    @functools.wraps(original)
    def _use_unsharded_views(self: Any, as_params: bool) -> None:
        if not as_params and self._training_state.name in _COMPUTING and _computes_on_local(self):
            extension, self._fsdp_extension = self._fsdp_extension, None
            try:
                return original(self, as_params)
            finally:
                self._fsdp_extension = extension
        original(self, as_params)
        if not as_params or not self._use_orig_params or self.uses_sharded_strategy:
            return
        for index, (name, module, _) in enumerate(self.flat_param._param_infos):
            new = module._parameters[name]
            if not isinstance(new, DTensor):
                continue
            kept = self.flat_param._params[index]
            if isinstance(kept, DTensor):
                kept._local_tensor = new._local_tensor.detach()
                self._setattr_param(module, name, kept)
            else:
                # The first time: what was here is the plain tensor that FSDP flattened. Unmarked, the new one would
                # be flattened again by the unit around this one.
                mark_flattened(new)
                new.requires_grad_(kept.requires_grad)
                self.flat_param._params[index] = new

    return _use_unsharded_views


def plain_gradients(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`FlatParamHandle._use_unsharded_grad_views` that gives parameters that are plain tensors plain gradients, and
    DTensors theirs in low precision, too."""

    @functools.wraps(original)
    def _use_unsharded_grad_views(self: Any) -> None:
        views_of = self._get_unflat_views
        of_another_type: list[tuple[DTensor, torch.Tensor]] = []

        def views(tensor: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
            for view, (name, module, _) in zip(views_of(tensor), self.flat_param._param_infos):
                parameter = getattr(module, name, None)
                if isinstance(view, DTensor):
                    if not isinstance(parameter, DTensor):
                        view = view.to_local()
                    elif view.dtype != parameter.dtype:
                        of_another_type.append((parameter, view.to_local()))
                yield view

        self._get_unflat_views = views
        try:
            original(self)
        finally:
            self._get_unflat_views = views_of
        for parameter, local in of_another_type:
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)  # FSDP1 has made it like the parameter
            gradient._local_tensor = local

    return _use_unsharded_grad_views


def giving_gradients(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """`FlatParamHandle._use_sharded_grad_views` that gives DTensor parameters of unsharded units DTensor gradients."""

    @functools.wraps(original)
    def _use_sharded_grad_views(self: Any) -> None:
        unsharded = self._use_orig_params and not self.uses_sharded_strategy
        if unsharded and any(isinstance(parameter, DTensor) for parameter in self.flat_param._params):
            self._use_unsharded_grad_views()
            for parameter, none in zip(self.flat_param._params, self.flat_param._is_grad_none_mask):
                if none or not parameter.requires_grad:
                    parameter.grad = None
        else:
            original(self)

    return _use_sharded_grad_views
