"""Predicted durations of completed collectives, and the ratio of measured to predicted time.

The prediction is that of `Comm.estimate`: the cost model replays the plan with the group's nodes and network estimate.
Calls on CUDA tensors have none. Within a node the model has fixed constants.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from smddp._constants import DTYPES
from smddp.observability.info import COLLECTIVES, communicators

#: Returns the predicted seconds of a recorded operation of a group's dump, or None without a prediction.
Predictor = Callable[[Mapping[str, Any], Mapping[str, Any]], "float | None"]

# Text of a call in a dump: "reduce(7 elements of float32, sum, root 3)".
_CALL = re.compile(r"(\w+)\(\d+ elements? of (\w+)((?:, [^()]*)?)\)")
_ROOT = re.compile(r", root (\d+)")
# Maximum number of known predictions. A program with more kinds of calls computes them again.
_MOST = 1024


class Predictions:
    """Predictions for this process's open groups. Each kind of call is simulated once.

    seconds: simulation time of one update, after which unknown calls have no prediction until the next `begin`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left = 0.0
        self._communicators: dict[str, Any] = {}
        self._known: dict[tuple[str, str | None, str, int], float | None] = {}

    def begin(self) -> None:
        """Starts an update: finds the open groups and resets the simulation time."""
        self._left, self._communicators = self._seconds, communicators()
        if len(self._known) > _MOST:
            self._known.clear()

    def __call__(self, group: Mapping[str, Any], op: Mapping[str, Any]) -> float | None:
        key = (group["name"], group.get("id"), op["call"], op["bytes"])
        if key not in self._known:
            comm = self._communicators.get(group["name"])
            if comm is None or self._left <= 0:
                return None
            begun = time.monotonic()
            self._known[key] = _predict(comm, op["call"], op["bytes"])
            self._left -= time.monotonic() - begun
        return self._known[key]


def _predict(comm: Any, call: str, nbytes: int) -> float | None:
    found = _CALL.fullmatch(call)
    if comm.size == 1 or found is None or found[1] not in COLLECTIVES or found[2] not in DTYPES:
        return None
    root = _ROOT.search(found[3])
    try:
        code = COLLECTIVES.index(found[1])
        seconds = comm.estimate(code, DTYPES[found[2]], nbytes, int(root[1]) if root else 0)
    except Exception:  # the settings select a plan that the model cannot simulate
        return None
    return float(seconds) or None


def ratios(
    group: Mapping[str, Any],
    ops: Iterable[Mapping[str, Any]],
    predict: Predictor,
    last: Mapping[int, int] | None = None,
) -> dict[str, float]:
    """Returns measured divided by predicted time of each collective, over successful operations of a group's dump.

    The measured time of a call is the shortest of its repetitions, because longer ones include waits for other ranks.
    last: time in ns of the last known rank's call, by sequence number; a call is measured from then.
    """
    best: dict[tuple[str, int], tuple[int, int]] = {}
    sample: dict[tuple[str, int], Mapping[str, Any]] = {}
    for op in ops:
        begun = max(op["submitted_ns"], op["started_ns"] or 0, (last or {}).get(op["seq"], 0))
        if (measured := op["ended_ns"] - begun) <= 0:
            continue
        key = (op["call"], op["bytes"])
        shortest, calls = best.get(key, (measured, 0))
        best[key] = min(measured, shortest), calls + 1
        sample[key] = op
    totals: dict[str, tuple[float, float]] = {}
    for key, (shortest, calls) in best.items():
        if predicted := predict(group, sample[key]):
            collective = sample[key]["what"].partition(" ")[0]
            spent, expected = totals.get(collective, (0.0, 0.0))
            totals[collective] = spent + calls * shortest / 1e9, expected + calls * predicted
    return {collective: spent / expected for collective, (spent, expected) in totals.items()}
