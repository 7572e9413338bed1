"""A user's script, run in existing ranks."""

from __future__ import annotations

import importlib
import os
import runpy

import torch.distributed as dist


def as_torchrun_would(path: str, port: int, library: str) -> None:
    """Runs the script with the variables that torchrun sets, whose store listens on `port`.

    library: module with the `state` that the script leaves initialized.
    """
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        importlib.import_module(library).state.reset()
