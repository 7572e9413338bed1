"""Contexts in which scripts make their model, and what is asked of them that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smddp.modelparallel import delayed

_INSTEAD = "torch.sagemaker has tensor parallelism: tsm.init({'tensor_parallel_degree': N}), tsm.transform(model)"


def _no_tensor_parallelism(what: str) -> NotImplementedError:
    return NotImplementedError(f"{what} is not there in this library's SMP v1. Instead: {_INSTEAD}")


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Modules made inside would share their layers; only ``enabled=False`` is there."""
    if enabled:
        raise _no_tensor_parallelism("smp.tensor_parallelism()")
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Have a module share its layers; only ``enabled=False`` is there."""
    if enabled:
        raise _no_tensor_parallelism("smp.set_tensor_parallelism()")


def tp_register(*args: Any, **kwargs: Any) -> Any:
    """Not there: raises NotImplementedError."""
    raise _no_tensor_parallelism("smp.tp_register()")


def tp_register_with_module(*args: Any, **kwargs: Any) -> Any:
    """Not there: raises NotImplementedError."""
    raise _no_tensor_parallelism("smp.tp_register_with_module()")


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Parameters made inside get their values where they lie: at the cut, or when the model is sharded.

    Until then they take no memory. Their values are no constructor's, as that draws one parameter after another: they
    come from the same functions, each with a seed that follows from torch's seed and the parameter's name.
    """
    with delayed.creation() if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_options: Any
) -> Iterator[None]:
    """Make a model inside whose parameters have ``dtype``.

    Args:
        tensor_parallelism: must be false.
        dtype: of the parameters; by default torch's.
        tensor_parallel_options: what they change are tensor-parallel modules, of which there are none.
    """
    if tensor_parallelism:
        raise _no_tensor_parallelism("smp.model_creation(tensor_parallelism=True)")
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class NotThere(nn.Module):
    """A tensor-parallel module of the original: scripts may name it and ask whether a module is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _no_tensor_parallelism(f"smp.nn.{type(self).__name__}")
