"""Calls composed of several operations of the core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smddp._core import Comm


@contextmanager
def one_call(comm: Comm, name: str) -> Iterator[None]:
    """Aborts the group when an exception leaves the block after its first operation started.

    Otherwise the other ranks would wait for operations that this rank never starts. A group that failed before keeps
    its reason. name: the call in the other ranks' errors. Raise errors that occur on all ranks after the block, so
    that the group remains usable.
    """
    begun = comm.sequence()
    try:
        yield
    except BaseException as error:
        if comm.sequence() != begun:
            comm.abort(f"rank {comm.rank} left {name} before its end ({type(error).__name__})")
        raise
