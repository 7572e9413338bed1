"""Key ``fp16`` under sharded data parallelism: the optimizer steps float32 shards of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from smddp.modelparallel.data_parallel.sharded_gradients import pieces
from smddp.modelparallel.optim.half_precision import Masters
from smddp.modelparallel.state import state


class Unscaled(Masters):
    """Variant of `Masters` with sharded parameters as masters: only unscales the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: torch.optim.Optimizer | None = None

    def adopt(self, optimizer: torch.optim.Optimizer, wanted: Callable[[torch.Tensor], bool]) -> None:
        self._optimizer = optimizer

    def take(self, scale: float) -> None:
        if not self.taken:
            for gradient in self.gradients():
                gradient.div_(scale)
        self.taken = True

    def gradients(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return pieces([q.grad for group in groups for q in group["params"] if q.grad is not None])

    def overflow(self) -> bool:
        assert state.ranks is not None  # as there is an optimizer
        found = self.gradients()
        finite = torch.ones((), device=found[0].device if found else "cpu")
        for gradient in found:
            finite = torch.minimum(finite, torch.isfinite(gradient).all().float())
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=state.ranks.dp_group)
        return not bool(finite)
