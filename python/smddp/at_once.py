"""The short way of a synchronous call on ordinary CPU tensors: one native function, which reads the tensors in C."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import Parameter

from smddp._native import core
from smddp.dtypes import AVG, MAX, MIN, SUM
from smddp.telling import tell

_REDUCTIONS = [(ReduceOp.SUM, SUM), (ReduceOp.AVG, AVG), (ReduceOp.MAX, MAX), (ReduceOp.MIN, MIN)]


def at_once(comm: Any) -> Any:
    """The calls of `comm` (see smddp._core.AtOnce); None where this torch does not tell of its tensors in C."""
    native = core()
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None or type(comm) is not native.Comm:
        return None
    try:
        return native.AtOnce(comm, exchange, [Tensor, Parameter], _REDUCTIONS, timedelta(0))
    except ValueError as error:
        tell(f"group {comm.name}: small calls take Python's longer way: {error}")
        return None
