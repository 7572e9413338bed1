"""The state of an optimizer over stages: the words in it, and the whole out of its parts."""

from __future__ import annotations

from typing import Any

import torch

IS_PARTIAL = "_smp_is_partial"
# Which parameters, by their number in the whole optimizer, a partial state was made of.
HELD = "_smp_params"
# Of the key fp16: the masters by number, and the scale.
MASTERS, LOSS_SCALE = "masters", "loss_scale"
# Of a state with a list of replicas' states: by replica, the numbers of their keys in the whole optimizer.
NUMBERS = "_smp_numbers"


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


def of_replicas(parts: list[dict[str, Any]], numbers: list[list[int]]) -> dict[str, Any]:
    """Merge the states of the replicas, with the list of their states as ``state``.

    Args:
        parts: of each replica, its state by number in the whole optimizer.
        numbers: of each replica, the numbers of the parameters in the groups of its wrapped optimizer.
    """
    states = []
    for part, own in zip(parts, numbers):
        index_of = {number: index for index, number in enumerate(own)}
        states.append({index_of[number]: values for number, values in part["state"].items()})
    held = sorted(number for part in parts for number in part[HELD])
    return {**merged(parts), "state": states, NUMBERS: numbers, IS_PARTIAL: parts[0][IS_PARTIAL], HELD: held}


def joined_replicas(values: dict[str, Any]) -> dict[str, Any]:
    """Return a state with one dictionary as ``state``, by number, in place of a list with one for each replica.

    Raises ValueError for a list of another library, which does not record its numbers.
    """
    states = values["state"]
    if not isinstance(states, list):
        return values
    if len(values.get(NUMBERS, ())) != len(states):
        raise ValueError(
            f"the optimizer's state is a list of {len(states)} replicas' states without their numbers "
            f"({NUMBERS!r}): load what local_state_dict() returned, with all its keys"
        )
    for replica, (part, own) in enumerate(zip(states, values[NUMBERS])):
        if part and max(part) >= len(own):
            raise ValueError(
                f"the optimizer's state of replica {replica} has index {max(part)}, but {NUMBERS!r} has {len(own)} "
                "numbers: load what local_state_dict() returned, unchanged"
            )
    state = {own[index]: each for part, own in zip(states, values[NUMBERS]) for index, each in part.items()}
    return {**{key: value for key, value in values.items() if key != NUMBERS}, "state": dict(sorted(state.items()))}
