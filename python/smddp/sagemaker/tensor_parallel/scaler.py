"""Loss scaling: the ranks of a tensor group step together, or all skip.

Each scales by what it finds in its own shards. If one alone found an overflow, it would keep its part of the
parameters and lower its scale while the others step, and the copies of what is whole would drift apart for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smddp.sagemaker.state_handler import state

Found = dict[torch.device, torch.Tensor]


def agreed(original: Callable[..., Found]) -> Callable[..., Found]:
    """``_unscale_grads_`` of a scaler that finds an overflow where any rank of the tensor group has one.

    torch's own agreement for DTensors goes by the layout of the first gradient alone, which may be replicated.
    """

    @functools.wraps(original)
    def _unscale_grads_(self: Any, *args: Any, **kwargs: Any) -> Found:
        found = original(self, *args, **kwargs)
        for overflow in found.values():
            assert state.mesh is not None  # `init` has put this here
            there = overflow.to(state.mesh.device_type)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=state.tp_process_group)
            if there is not overflow:
                overflow.copy_(there)
        return found

    return _unscale_grads_
