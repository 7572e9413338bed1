"""Recorder dumps of other processes, from a socket or a file: parsed and checked against the recorder's format.

`smddp status` and `smddp trace` read them, so one process with an answer that does not fit must be an error about that
process, not a traceback. Needs neither torch nor the core.
"""

from __future__ import annotations

import json
from typing import Any

_LARGEST = 1 << 63
_DEEPEST = 32
#: Maximum groups of a process, and pending calls of a group: 32 collectives and 32 messages.
_MOST_GROUPS, _MOST_PENDING = 8192, 64


def or_null(kind: Any) -> Any:
    """Returns the kind of a value that may also be null, for `check`."""
    return (kind,)


_SHOWN = {"what": str, "algorithm": or_null(str), "seconds": float}
_OPERATION = {
    **_SHOWN,
    "seq": int,
    "call": str,
    "bytes": int,
    "outcome": str,
    "submitted_ns": int,
    "started_ns": or_null(int),
    "ended_ns": or_null(int),
}
_PENDING = {
    "seq": int,
    "what": str,
    "call": str,
    "seconds": float,
    "waits?": or_null(bool),
    "waited_seconds?": or_null(float),
    "message": or_null({"sends": bool, "peer": or_null(int)}),
}
_LINK = {
    "peer": int,
    "rtt_us": int,
    "min_rtt_us": or_null(int),
    "delivery_bytes_per_s": or_null(int),
    "mean_bytes_per_s": or_null(int),
    "receiver_limited": float,
    "sent_bytes": int,
    "received_bytes": int,
    "retransmits": int,
}
# A name with a question mark is absent in dumps of older versions.
_GROUP = {
    "id?": or_null(str),
    "submitted?": int,
    "recorded?": bool,
    "finished?": int,
    "pending?": [_PENDING],
    "nodes?": int,
    "network?": or_null({"latency_us": float, "bytes_per_s": float, "basis": str}),
    "links?": [_LINK],
    "name": str,
    "rank": int,
    "size": int,
    "way": str,
    "error": or_null(str),
    "present": or_null(_SHOWN),
    "last": or_null(_SHOWN),
    "taken": [{"algorithm": str, "bytes": int}],
}
_PROCESS = {
    "process?": str,
    "host": str,
    "pid": int,
    "rank": or_null(int),
    "time_ns": int,
    "at": str,
    "groups": [_GROUP],
}
#: With the newest operations of each group.
_DUMP = {**_PROCESS, "groups": [{**_GROUP, "operations": [_OPERATION], "messages": [_OPERATION]}]}


def parse(text: str | bytes, operations: bool = True) -> dict[str, Any]:
    """Returns the dump that `text` holds as JSON; operations: with the operations of each group.

    Raises ValueError with the place, the expected type and the value.
    """
    try:
        found = json.loads(text)
        if _depth(found) > _DEEPEST:
            raise RecursionError
    except RecursionError:
        raise ValueError(f"its JSON is nested more than {_DEEPEST} levels deep") from None
    except ValueError as error:
        raise ValueError(f"invalid JSON: {error}") from None
    check(found, _DUMP if operations else _PROCESS)
    _check_counts(found["groups"])
    for group in found["groups"] if operations else ():
        for op in group["operations"]:
            if op["outcome"] == "ok" and op["ended_ns"] is None:
                raise ValueError(f"operation {op['seq']} of group {group['name']!r} succeeded and has no ended_ns")
    checked: dict[str, Any] = found
    return checked


def _check_counts(groups: list[dict[str, Any]]) -> None:
    if len(groups) > _MOST_GROUPS:
        raise ValueError(f"groups: expected at most {_MOST_GROUPS}, got {len(groups)}")
    for number, group in enumerate(groups):
        pending = len(group.get("pending", ()))
        if pending > _MOST_PENDING:
            raise ValueError(f"groups[{number}].pending: expected at most {_MOST_PENDING} calls, got {pending}")


def _depth(found: Any) -> int:
    deepest, left = 0, [(found, 1)]
    while left and deepest <= _DEEPEST:
        value, depth = left.pop()
        if isinstance(value, (dict, list)):
            deepest = max(deepest, depth)
            left += [(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    return deepest


#: Place of a value: the place of its container, and its name or index in that.
_Place = tuple[Any, Any] | None


def check(value: Any, kind: Any, place: _Place = None) -> None:
    """Raises ValueError with the place, the expected kind and the value, if `value` is of another kind."""
    if isinstance(kind, tuple):
        if value is not None:
            check(value, kind[0], place)
    elif isinstance(kind, dict):
        _expect(isinstance(value, dict), "an object", value, place)
        for key, inner in kind.items():
            name = key.removesuffix("?")
            if name in value:
                check(value[name], inner, (place, name))
            elif name == key:
                raise ValueError(f"{_name(place)} has no {name!r}")
    elif isinstance(kind, list):
        _expect(isinstance(value, list), "a list", value, place)
        for number, each in enumerate(value):
            check(each, kind[0], (place, number))
    elif kind is bool:
        _expect(isinstance(value, bool), "true or false", value, place)
    elif kind is str:
        _expect(isinstance(value, str), "text", value, place)
    else:
        # An integer is a number, too; True, NaN and infinity are none.
        right = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        _expect(right and abs(value) < _LARGEST, "a 64-bit integer" if kind is int else "a number", value, place)


def _name(place: _Place) -> str:
    """Returns "groups[0].pending" for a place. Only an error needs it."""
    name = ""
    while place is not None:
        place, part = place
        name = (f"[{part}]" if isinstance(part, int) else f".{part}") + name
    return name.lstrip(".") or "the dump"


def _expect(holds: bool, kind: str, value: Any, place: _Place) -> None:
    if not holds:
        shown = type(value).__name__ if isinstance(value, (dict, list)) else repr(value)
        raise ValueError(f"{_name(place)}: expected {kind}, got {shown[:80]}")
