"""`smp.amp.GradScaler`: torch's, with one decision over all stages on finite gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel import sharded
from smddp.modelparallel.state import state


class GradScaler(torch.amp.GradScaler):
    """Extends torch.amp.GradScaler: a nonfinite gradient on any stage skips the step on all stages.

    Args:
        device: "cuda" where there is one, else "cpu"; the others are torch's.
    """

    def __init__(self, device: str | None = None, **others: Any) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **others)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        shared = state.model is not None and sharded.of(state.model) is not None
        if state.ranks is None or (state.ranks.mp_size == 1 and not shared):
            return found
        # A stage without gradients in this optimizer contributes zero and receives the result of the others.
        flags = list(found.values()) or [found_inf]
        verdict = torch.stack([flag.to(found_inf.device) for flag in flags]).max()
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=state.ranks.dp_group if shared else state.ranks.mp_group)
        found = found or {found_inf.device: found_inf}
        return {device: flag.fill_(verdict) for device, flag in found.items()}
