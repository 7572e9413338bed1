"""Steps between asynchronous checkpoints, from measured durations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist

# Share of the training time that checkpoints may add.
_OVERHEAD = 0.1


@dataclass
class _Interval:
    """Steps between checkpoints, and the measurements behind the choice.

    Attributes:
        interval: in steps; 0 until `compute_auto_checkpoint_interval` has chosen one.
        step_duration: of a step without a checkpoint, in seconds: the smallest of all ranks.
        overhead: seconds that a checkpoint adds to its step: the largest of all ranks.
        io_duration: seconds until a checkpoint is written in the background: the largest of all ranks.
    """

    interval: int = 0
    step_duration: float = 0.0
    overhead: float = 0.0
    io_duration: float = 0.0


def compute_auto_checkpoint_interval(
    step_durations: Sequence[float],
    step_ckpt_durations: Sequence[float],
    ckpt_preprocessing_durations: Sequence[float],
    ckpt_io_durations: Sequence[float],
) -> _Interval:
    """Returns the smallest interval that completes each checkpoint before the next, with at most 10 % overhead.

    Collective over all ranks where a default group exists; every rank gets the same interval.

    Args:
        step_durations: of steps without a checkpoint, in seconds.
        step_ckpt_durations: of steps with one.
        ckpt_preprocessing_durations: of what a checkpoint does in such a step before it is written.
        ckpt_io_durations: of writing in the background.

    Raises ValueError on every rank if one measured no step, or only steps of no duration.
    """
    step = fmean(step_durations) if step_durations else 0.0
    added = fmean(step_ckpt_durations) - step if step_ckpt_durations else 0.0
    added = max([0.0, added, *([fmean(ckpt_preprocessing_durations)] if ckpt_preprocessing_durations else [])])
    # The largest of all ranks; of the steps the smallest.
    measured = torch.tensor([-step, added, max([0.0, *ckpt_io_durations])], dtype=torch.float64)
    if dist.is_available() and dist.is_initialized():
        of_all: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
        dist.all_gather_object(of_all, measured)
        measured = torch.stack(of_all).amax(0)
    # Raised on every rank: a rank that raises before the exchange leaves the others waiting.
    if not -measured[0] > 0:
        raise ValueError("step_durations: expected positive durations in seconds on each rank")
    step, added, written = -measured[0].item(), measured[1].item(), measured[2].item()
    return _Interval(max(1, math.ceil(written / step), math.ceil(added / (_OVERHEAD * step))), step, added, written)
