"""User script in existing ranks."""

from __future__ import annotations

import os
import runpy

import torch.distributed as dist
from smddp.modelparallel.state import state


def as_torchrun_would(path: str, port: int) -> None:
    """Runs the script with the variables that torchrun sets, whose store listens on ``port``."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        state.reset()
