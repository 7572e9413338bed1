"""The forward of ``OffloadWrapper`` while ``sm_activation_offloading`` is enabled.

Scripts bind the name ``offload_wrapper`` long before ``tsm.init()``, so what changes is the class's method.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from smddp.sagemaker.offload.engine import engine
from smddp.sagemaker.private_names import CHECKPOINT_WRAPPER, WRAPPED, in_backward

# Checkpointed layers with registered hooks: layer -> hook handles.
_hooked: weakref.WeakKeyDictionary[torch.nn.Module, list] = weakref.WeakKeyDictionary()
# Wrappers whose layers were looked for and found.
_known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def prefetching_forward(original: Callable, horizon: Callable[[], int]) -> Callable:
    """The replacement of ``OffloadWrapper.forward``, whose present value is ``original``.

    ``horizon`` is asked at every forward for the number of layers to load ahead, >= 0.

    The replacement raises ValueError in training mode if no module inside the wrapper is checkpoint-wrapped.
    """

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Inside another wrapper's forward that one's pass covers us; inside backward this is a recomputation,
        # whose tensors are needed at once.
        covered = engine().in_pass() or in_backward()
        if not covered and not _find_layers(self):
            if self.training:
                raise ValueError(_nothing_checkpointed(self))
            return original(self, *args, **kwargs)
        if covered or not torch.is_grad_enabled():
            return WRAPPED.of(self)(*args, **kwargs)
        with engine().forward_pass(self, horizon()):
            return WRAPPED.of(self)(*args, **kwargs)

    return forward


def forget_layers() -> None:
    """Remove the hooks of all layers."""
    for handles in _hooked.values():
        for handle in handles:
            handle.remove()
    _hooked.clear()
    _known.clear()


def _find_layers(wrapper: torch.nn.Module) -> bool:
    """Returns True if ``wrapper`` contains checkpoint-wrapped modules; registers their begin and end hooks."""
    if wrapper in _known:
        return True
    layers = [m for m in wrapper.modules() if isinstance(m, CHECKPOINT_WRAPPER.get())]
    for layer in layers:
        if layer not in _hooked:
            _hooked[layer] = [
                layer.register_forward_pre_hook(_enter, prepend=True),
                layer.register_forward_hook(_leave, always_call=True),
            ]
    if layers:
        _known.add(wrapper)
    return bool(layers)


def _enter(layer: torch.nn.Module, args: tuple) -> None:
    if not in_backward():
        engine().enter_layer(layer)


def _leave(layer: torch.nn.Module, args: tuple, output: Any) -> None:
    if not in_backward():
        engine().leave_layer()


def _nothing_checkpointed(wrapper: torch.nn.Module) -> str:
    inside = type(WRAPPED.of(wrapper)).__name__
    return (
        f"sm_activation_offloading is on, but offload_wrapper({inside}) holds 0 checkpoint-wrapped modules, and the "
        f"inputs of checkpointed layers are what it offloads. Call apply_activation_checkpointing(model, "
        f"check_fn=...) before model = offload_wrapper(model) (checkpointing inside, offloading outside; "
        f"gradient_checkpointing_enable() of transformers does not wrap modules), or set "
        f"sm_activation_offloading to false to offload by torch's own means."
    )
