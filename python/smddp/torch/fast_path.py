"""Fast path of a call on ordinary tensors: one native function that reads the tensors in C."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Parameter

from smddp._native import core
from smddp.observability.log import info
from smddp.torch.dtypes import AVG, MAX, MIN, SUM

# Classes of ordinary tensors; subclasses are excluded.
KINDS: list[type] = [Tensor, Parameter]
_REDUCTIONS = [(ReduceOp.SUM, SUM), (ReduceOp.AVG, AVG), (ReduceOp.MAX, MAX), (ReduceOp.MIN, MIN)]


def exchange() -> Any:
    """Returns torch's C functions for tensor metadata (DLPack's exchange API); None in an older torch."""
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def fast_path(comm: Any, host: bool = True) -> Any:
    """Returns the fast path of `comm` (smddp._core.FastPath); None if this torch has no C API for tensor metadata.

    host: the group serves CPU tensors.
    """
    native = core()
    table = exchange()
    if table is None or type(comm) is not native.Comm:
        return None
    try:
        return native.FastPath(comm, table, KINDS, _REDUCTIONS, timedelta(0), host)
    except ValueError as error:
        info(f"group {comm.name}: no fast path for small calls: {error}")
        return None
