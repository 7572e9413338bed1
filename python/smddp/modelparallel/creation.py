"""Contexts in which scripts make their model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from smddp.modelparallel import delayed
from smddp.modelparallel.tensor.marks import tensor_parallelism as shared


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Delays the values of parameters created inside until the cut or the sharding of the model.

    Until then they use no memory. The initial values differ from those of a constructor, which draws parameters in
    sequence. The same functions compute them, each with a seed derived from torch's seed and the parameter's name.

    Args:
        enabled: False: no effect.
    """
    with delayed.creation() if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_options: Any
) -> Iterator[None]:
    """Make a model inside whose parameters have ``dtype``.

    Args:
        tensor_parallelism: whether its layers are shared, as by `tensor_parallelism`.
        dtype: of the parameters; by default torch's.
        tensor_parallel_options: as `tensor_parallelism` takes them.
    """
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with shared(**tensor_parallel_options) if tensor_parallelism else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)
