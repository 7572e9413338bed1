"""The state of an optimizer over stages: the words in it, and the whole out of its parts."""

from __future__ import annotations

from typing import Any

import torch

IS_PARTIAL = "_smp_is_partial"
# Which parameters, by their number in the whole optimizer, a partial state was made of.
HELD = "_smp_params"
# Of the key fp16: the masters by number, and the scale.
MASTERS, LOSS_SCALE = "masters", "loss_scale"


def on_cpu(value: Any) -> Any:
    """``value`` with its tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    return value


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of the stages into that of the same optimizer in one process."""
    whole = {key: value for key, value in parts[0].items() if key not in (IS_PARTIAL, HELD)}
    for key in ("state", MASTERS):
        if key in whole:
            values: dict[int, Any] = {}
            for part in parts:
                values.update(part[key])
            whole[key] = dict(sorted(values.items()))
    return whole
