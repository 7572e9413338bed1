"""The names under which SMP before 2.7 saved FSDP models; today `smddp.sagemaker.distributed.checkpoint` does.

What is documented of this module is its end, not its signatures; these functions take what any such call must say,
and refuse the rest.
"""

from __future__ import annotations

import os
import pickle
import warnings
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from smddp.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver

__all__ = [
    "EXPORT_KEY_EXTRA",
    "EXPORT_KEY_MODEL",
    "EXPORT_KEY_OPTIMIZER",
    "load_model_checkpoint",
    "save_model_checkpoint",
]

EXPORT_KEY_MODEL = "model"
EXPORT_KEY_OPTIMIZER = "optimizer"
EXPORT_KEY_EXTRA = "extra"

_OPTIONS = ("process_group", "coordinator_rank")


def _old(name: str, instead: str, options: dict[str, Any]) -> None:
    warnings.warn(
        f"torch.sagemaker.distributed.fsdp.checkpoint.{name} is deprecated: use "
        f"torch.sagemaker.distributed.checkpoint.{instead}",
        DeprecationWarning,
        stacklevel=3,
    )
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise TypeError(f"{name}: unknown arguments {', '.join(unknown)}; expected {', '.join(_OPTIONS)}")


def save_model_checkpoint(
    model: nn.Module, path: str | os.PathLike, optimizer: Any = None, extra: Any = None, **options: Any
) -> None:
    """Saves a sharded checkpoint of ``model`` (and ``optimizer``) to ``path``. Collective. Deprecated.

    Args:
        extra: anything that pickles, saved with it.
        options: ``process_group`` and ``coordinator_rank`` of `state_dict_saver.save`.

    Raises:
        TypeError: other options; their meaning is not documented.
    """
    _old("save_model_checkpoint", "state_dict_saver.save", options)
    saved: dict[str, Any] = {EXPORT_KEY_MODEL: get_model_state_dict(model)}
    if optimizer is not None:
        saved[EXPORT_KEY_OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
    if extra is not None:
        saved[EXPORT_KEY_EXTRA] = pickle.dumps(extra)
    state_dict_saver.save(saved, checkpoint_id=path, **options)


def load_model_checkpoint(
    model: nn.Module, path: str | os.PathLike, optimizer: Any = None, extra: Any = None, **options: Any
) -> Any:
    """Loads a checkpoint of `save_model_checkpoint` into any layout; returns its ``extra``. Collective. Deprecated.

    Args:
        extra: give anything but None if the checkpoint has one.
        options: as in `save_model_checkpoint`.

    Raises:
        TypeError: other options.
        ValueError, FileNotFoundError: as `state_dict_loader.load` does.
    """
    _old("load_model_checkpoint", "state_dict_loader.load", options)
    loaded: dict[str, Any] = {EXPORT_KEY_MODEL: get_model_state_dict(model)}
    if optimizer is not None:
        loaded[EXPORT_KEY_OPTIMIZER] = get_optimizer_state_dict(model, optimizer)
    if extra is not None:
        loaded[EXPORT_KEY_EXTRA] = b""
    state_dict_loader.load(loaded, checkpoint_id=path, **options)
    set_model_state_dict(model, loaded[EXPORT_KEY_MODEL])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, loaded[EXPORT_KEY_OPTIMIZER])
    return pickle.loads(loaded[EXPORT_KEY_EXTRA]) if extra is not None else None
