"""Refusal of FSDP2 over gloo on CPUs in versions of torch whose FSDP2 sums gradients there instead of averaging them.

FSDP2 reduces float32 and bfloat16 gradients by `reduce_scatter_tensor` with `ReduceOp.AVG`. Before torch 2.9, gloo
treats that operation as a sum (pytorch/pytorch#162338).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.sagemaker.state_handler import state

# Oldest torch whose FSDP2 averages gradients over gloo: major and minor version.
FIRST_CORRECT = (2, 9)


def torch_sums() -> bool:
    """Returns True if FSDP2 of this torch sums gradients over gloo."""
    version: Any = torch.__version__  # a TorchVersion, which compares with tuples
    return bool(version < FIRST_CORRECT)


def around_fully_shard(original: Callable[..., Any]) -> Callable[..., Any]:
    """`fully_shard` that raises RuntimeError for a mesh of CPUs whose shard group has several ranks and uses gloo."""

    @functools.wraps(original)
    def checked(module: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = kwargs.get("mesh")
        # Without a mesh, the units of `fully_shard` span the world.
        group = mesh.get_group(mesh.ndim - 1) if mesh is not None else dist.group.WORLD
        mesh = mesh if mesh is not None else state.mesh
        assert group is not None and mesh is not None  # `init` has made both
        if mesh.device_type == "cpu" and group.size() > 1 and "cpu:gloo" in dist.get_backend_config(group).split(","):
            correct = ".".join(map(str, FIRST_CORRECT))
            raise RuntimeError(
                f"fully_shard over gloo on CPUs: torch {torch.__version__} sums the gradients of the {group.size()} "
                f"ranks instead of averaging them. Use init_process_group(backend='smddp'), or torch {correct} or later"
            )
        return original(module, *args, **kwargs)

    return checked
