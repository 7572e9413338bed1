"""torch's option objects.

Every c10d method takes either an options object or its fields, in an order that depends on the method. The types
identify the fields.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import ReduceOp

Options = TypeVar("Options")

_ZERO = timedelta(0)


def gather_options(cls: type[Options], *values: Any) -> Options:
    """Returns the options object among `values`, or a new one: an int is the root, a timedelta the timeout."""
    for value in values:
        if isinstance(value, cls):
            return value
    made = cls()
    fields: Any = made
    for value in values:
        if value is None:
            continue
        if isinstance(value, timedelta):
            fields.timeout = value
        elif isinstance(value, (ReduceOp, ReduceOp.RedOpType)):
            fields.reduceOp = value
        elif type(value) is int:
            fields.rootRank = value
        else:
            # Coalesced and plain options are interchangeable here.
            if hasattr(value, "reduceOp") and hasattr(made, "reduceOp"):
                fields.reduceOp = value.reduceOp
            if hasattr(value, "asyncOp") and hasattr(made, "asyncOp"):
                fields.asyncOp = value.asyncOp
            if not hasattr(value, "timeout"):
                raise TypeError(f"expected {cls.__name__}, an int, a timedelta or a ReduceOp, got {value!r}")
            fields.timeout = value.timeout
    return made


def seconds(options: Any) -> float:
    """Returns the timeout of one call in seconds; 0: the group's timeout."""
    timeout = options.timeout
    return timeout.total_seconds() if timeout > _ZERO else 0.0
