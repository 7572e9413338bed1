"""The short way of a call on ordinary tensors: one native function, which reads the tensors in C."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Parameter

from smddp._native import core
from smddp.observability.log import tell
from smddp.torch.dtypes import AVG, MAX, MIN, SUM

# The classes of ordinary tensors, without those derived from them.
KINDS: list[type] = [Tensor, Parameter]
_REDUCTIONS = [(ReduceOp.SUM, SUM), (ReduceOp.AVG, AVG), (ReduceOp.MAX, MAX), (ReduceOp.MIN, MIN)]


def exchange() -> Any:
    """torch's functions that tell of its tensors in C: DLPack's exchange API; None in an older torch."""
    return getattr(Tensor, "__dlpack_c_exchange_api__", None)


def at_once(comm: Any, host: bool = True) -> Any:
    """The calls of `comm` (see smddp._core.AtOnce); None where this torch does not tell of its tensors in C.

    host: the group serves CPU tensors.
    """
    native = core()
    table = exchange()
    if table is None or type(comm) is not native.Comm:
        return None
    try:
        return native.AtOnce(comm, table, KINDS, _REDUCTIONS, timedelta(0), host)
    except ValueError as error:
        tell(f"group {comm.name}: small calls take Python's longer way: {error}")
        return None
