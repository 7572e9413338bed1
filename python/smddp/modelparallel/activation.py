"""Activation checkpointing: recompute a module's intermediate results in the backward pass instead of storing them.

A checkpointed module remains on one stage. It is marked before the model is cut.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as of_torch

from smddp.modelparallel import offloading
from smddp.modelparallel.partitioning.partition import CHECKPOINTED
from smddp.modelparallel.state import state


class CalledApart(nn.Sequential):
    """Modules that the model calls individually; each is checkpointed separately under every strategy."""


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Checkpoint the activations of every call of a module. Call it before the first step.

    Args:
        strategy: for a torch.nn.Sequential: "each" checkpoints every module separately; "group_N" (N modules at a time)
            and "contiguous" (all modules at once) keep it on one stage.
        pack_args_as_tuple: for a torch.nn.Sequential: pass a tuple from module to module as one argument. As in
            torch, this is always the case.

    The modules of a ModuleList or ModuleDict, which is never called itself, are checkpointed one by one. In training
    they receive no cache of keys and values of transformers, as with transformers' own gradient checkpointing.

    Raises:
        ValueError: an unknown strategy, or one for a single module; in a step, a cache that already holds keys.
        RuntimeError: the model is already cut.
    """
    size = _group(strategy)
    apart = isinstance(module, (CalledApart, nn.ModuleList, nn.ModuleDict))
    if apart or (isinstance(module, nn.Sequential) and size == 1):
        for child in module.children():
            _mark(child, preserve_rng_state, 0)
        return
    if not isinstance(module, nn.Sequential) and size != 1:
        raise ValueError(f"strategy={strategy!r} is for a torch.nn.Sequential, not {type(module).__name__}")
    _mark(module, preserve_rng_state, size if isinstance(module, nn.Sequential) else 0)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module with activation checkpointing, in this and all later calls."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"checkpoint() takes a module, got {type(module).__name__}")
    set_activation_checkpointing(module, preserve_rng_state)
    return module(*args, **kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call a Sequential with its activations checkpointed, now and from now on; see `set_activation_checkpointing`."""
    if not isinstance(sequential, nn.Sequential):
        raise TypeError(f"checkpoint_sequential() takes a torch.nn.Sequential, got {type(sequential).__name__}")
    set_activation_checkpointing(sequential, preserve_rng_state, pack_args_as_tuple, strategy)
    return sequential(input)


def _group(strategy: str) -> int:
    """Return the number of modules of a Sequential to checkpoint together; 0: all."""
    if strategy in ("each", "contiguous"):
        return int(strategy == "each")
    if strategy.startswith("group_") and strategy[6:].isdigit() and int(strategy[6:]) > 0:
        return int(strategy[6:])
    raise ValueError(f"strategy={strategy!r} must be 'each', 'contiguous' or 'group_N' with a number N")


def _mark(module: nn.Module, preserve_rng_state: bool, size: int) -> None:
    """Wrap a module's forward; for a Sequential, checkpoint ``size`` modules at a time, or all if 0."""
    if CHECKPOINTED in module.__dict__:
        return
    if state.model is not None and state.model.partitioned and state.ranks is not None and state.ranks.pp_size > 1:
        raise RuntimeError(
            f"checkpointing of {type(module).__name__} comes after the cut: call smp.set_activation_checkpointing() "
            "before the first step"
        )
    # Tensor parallelism changes the class of modules, so forward is looked up at each call.
    inner = module.__dict__.get("forward", lambda *args, **kwargs: type(module).forward(module, *args, **kwargs))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            args = tuple(_without_cache(module, value) for value in args)
            kwargs = {name: _without_cache(module, value) for name, value in kwargs.items()}
        if size == 0 or size >= len(layers):
            with offloading.layer(module):
                return of_torch.checkpoint(
                    inner, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
                )
        (value,) = args
        for first in range(0, len(layers), size):
            group = nn.Sequential(*layers[first : first + size])
            with offloading.layer(group):
                value = of_torch.checkpoint(group, value, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return value

    layers = list(module) if isinstance(module, nn.Sequential) else []
    # Past nn.Module's own: neither a parameter nor a buffer.
    module.__dict__[CHECKPOINTED], module.__dict__["forward"] = True, forward


def _without_cache(module: nn.Module, value: Any) -> Any:
    """Replaces an empty cache by None: the forward pass and its recomputation would both append to it."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    if not isinstance(value, cache):
        return value
    if length := int(value.get_seq_length()):
        raise ValueError(
            f"smp.set_activation_checkpointing(): {type(module).__name__} received past_key_values of {length} "
            "positions, expected none: its recomputation would append to them again. Pass use_cache=False and no "
            "past_key_values, or do not checkpoint this module"
        )
    return None
