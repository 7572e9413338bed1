"""Group of all ranks of the training job."""

from __future__ import annotations

from typing import Any

import smddp
from smddp._native import core
from smddp.arrays.communicator import DEFAULT_TIMEOUT, Communicator
from smddp.tensorflow import interrupt

_world: Communicator | None = None


def init(timeout: float = DEFAULT_TIMEOUT) -> None:
    """Forms the group of all ranks that the launcher started, as `smddp.init`, with its errors.

    Args:
        timeout: Seconds for the rendezvous and for each call.

    Raises:
        RuntimeError: The group exists already.
        ImportError: This TensorFlow lacks a required function.
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
    """Leaves the group together with the other ranks. `init` may be called again afterwards."""
    global _world
    if _world is None:
        return
    core().tensorflow(None)
    interrupt.unwatch()
    left, _world = _world, None
    left.close()


def abort(reason: str) -> None:
    """Aborts pending calls on all ranks."""
    if _world is not None:
        _world.abort(reason)


def world() -> Communicator:
    """Returns the group. Raises ValueError before `init`."""
    if _world is None:
        raise ValueError("smdistributed.dataparallel.tensorflow is not initialized: call init() first")
    return _world


def size() -> int:
    """Number of ranks. Raises ValueError before `init`."""
    return world().size


def rank() -> int:
    """Rank of this process, from 0. Raises ValueError before `init`."""
    return world().rank


def local_size() -> int:
    """Number of ranks on this host. Raises ValueError before `init`."""
    return world().local_size


def local_rank() -> int:
    """Rank of this process on its host, from 0. Raises ValueError before `init`."""
    return world().local_rank


class WorkerComm:
    """Collectives on pickled objects, for trusted peers only."""

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
        """Returns rank `root`'s value.

        Args:
            value: Object that pickle can serialize, on the root.
            root: Rank of the value.
        """
        return world().broadcast_object(value, root)

    def allgather(self, value: Any) -> list[Any]:
        """Returns all ranks' values in rank order."""
        return world().all_gather_object(value)

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Returns all ranks' values at rank `root`, None at the others.

        Args:
            value: Object that pickle can serialize.
            root: Rank of the result.
        """
        found = world().all_gather_object(value)
        return found if world().rank == root else None

    def barrier(self) -> None:
        world().barrier()

    Barrier = barrier


def get_worker_comm() -> WorkerComm:
    """Returns the object collectives `gather`, `bcast`, `allgather`, `barrier`. Raises ValueError before `init`."""
    world()
    return WorkerComm()
