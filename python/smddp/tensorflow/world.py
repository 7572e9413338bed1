"""This process's rank among those that train together."""

from __future__ import annotations

from typing import Any

import smddp
from smddp._native import core
from smddp.arrays.communicator import DEFAULT_TIMEOUT, Communicator
from smddp.tensorflow import interrupt

_world: Communicator | None = None


def init(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Meet all ranks that the launcher started (see `smddp.init`). timeout: seconds, of the meeting and of every call.

    Raises RuntimeError where it was called before; what `smddp.init` raises; ImportError where this TensorFlow lacks a
    function that is needed.
    """
    global _world
    if _world is not None:
        raise RuntimeError("init() called more than once. smdistributed.dataparallel is already initialized.")
    core().tensorflow(None)
    _world = smddp.init(timeout=timeout)
    core().tensorflow(_world.communicator)
    interrupt.watch(abort)


def is_initialized() -> bool:
    return _world is not None


def shutdown() -> None:
    """Leave the group, together with the other ranks. `init` may be called again then."""
    global _world
    if _world is None:
        return
    core().tensorflow(None)
    interrupt.unwatch()
    left, _world = _world, None
    left.close()


def abort(reason: str) -> None:
    """End what waits, here and at the other ranks."""
    if _world is not None:
        _world.abort(reason)


def world() -> Communicator:
    """The group. Raises ValueError before `init`."""
    if _world is None:
        raise ValueError("smdistributed.dataparallel.tensorflow is not initialized: call init() first")
    return _world


def size() -> int:
    """Number of ranks. Raises ValueError before `init`."""
    return world().size


def rank() -> int:
    """This process among all ranks, from 0. Raises ValueError before `init`."""
    return world().rank


def local_size() -> int:
    """Number of ranks on this host. Raises ValueError before `init`."""
    return world().local_size


def local_rank() -> int:
    """This process among those of its host, from 0. Raises ValueError before `init`."""
    return world().local_rank


class WorkerComm:
    """Objects among the ranks, pickled on the way: from peers that you trust."""

    @property
    def rank(self) -> int:
        return world().rank

    @property
    def size(self) -> int:
        return world().size

    def Get_rank(self) -> int:
        return world().rank

    def Get_size(self) -> int:
        return world().size

    def bcast(self, value: Any = None, root: int = 0) -> Any:
        """What rank `root` gives."""
        return world().broadcast_object(value, root)

    def allgather(self, value: Any) -> list[Any]:
        """What every rank gives, in rank order."""
        return world().all_gather_object(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """The same at rank `root`, None at the others."""
        found = world().all_gather_object(value)
        return found if world().rank == root else None

    def barrier(self) -> None:
        world().barrier()

    Barrier = barrier


def get_worker_comm() -> WorkerComm:
    """Objects among the ranks: `gather`, `bcast`, `allgather`, `barrier`. Raises ValueError before `init`."""
    world()
    return WorkerComm()
