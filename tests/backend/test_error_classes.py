"""Every entry point raises the documented classes for all errors of the core."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from smddp.torch import errors, rendezvous
from smddp.torch.process_group import SmddpProcessGroup

NAMES = [
    "Error",
    "CollectiveTimeoutError",
    "MismatchError",
    "PeerLostError",
    "CorruptionError",
    "ClosedError",
    "TopologyError",
]


class Failing:
    """A core communicator or handle that raises `error` in every method."""

    name = "failing"

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def error(self) -> BaseException:
        return self._error

    def is_done(self) -> bool:
        return True

    def path(self, *of: object) -> str:
        return "a path"

    def leave_seconds(self) -> float:
        return 1.0

    def sequence(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise self._error

        return fail


def one() -> torch.Tensor:
    return torch.ones(2)


# Calls of a group of one rank, by the name of the method.
CALLS: dict[str, Callable[[Any], Any]] = {
    "all_gather_single": lambda g: g.all_gather_single(one(), one()),
    "all_gather_single_coalesced": lambda g: g.all_gather_single_coalesced([one()], [one()]),
    "all_to_all_single": lambda g: g.all_to_all_single(one(), one(), [], []),
    "allgather": lambda g: g.allgather([[one()]], [one()]),
    "allgather_coalesced": lambda g: g.allgather_coalesced([[one()]], [one()]),
    "allreduce": lambda g: g.allreduce([one()]),
    "allreduce_coalesced": lambda g: g.allreduce_coalesced([one()]),
    "allreduce_sparse": lambda g: g.allreduce_sparse([one().to_sparse()]),
    "alltoall": lambda g: g.alltoall([one()], [one()]),
    "barrier": lambda g: g.barrier(),
    "broadcast": lambda g: g.broadcast([one()]),
    "gather": lambda g: g.gather([[one()]], [one()]),
    "gather_single": lambda g: g.gather_single(one(), one(), 0),
    "recv": lambda g: g.recv([one()], 1, 0),
    "recv_anysource": lambda g: g.recv_anysource([one()], 0),
    "reduce": lambda g: g.reduce([one()]),
    "reduce_scatter": lambda g: g.reduce_scatter([one()], [[one()]]),
    "reduce_scatter_single": lambda g: g.reduce_scatter_single(one(), one()),
    "reduce_scatter_single_coalesced": lambda g: g.reduce_scatter_single_coalesced([one()], [one()]),
    "scatter": lambda g: g.scatter([one()], [[one()]]),
    "send": lambda g: g.send([one()], 1, 0),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "shutdown": lambda g: g.shutdown(),
    "monitored_barrier without a store": lambda g: g._own_barrier(1.0),
    "wait": lambda g: handle(g).wait(),
    "synchronize": lambda g: handle(g).synchronize(),
    "exception": lambda g: raise_(handle(g).exception()),
    "wait with a timeout": lambda g: handle(g).wait(datetime.timedelta(seconds=1)),
    "wait of two": lambda g: smddp_work().join([handle(g), handle(g)]).wait(),
    "connect": lambda g: connect(g._comm),
}


def smddp_work() -> Any:
    from smddp.torch import work

    return work


def handle(group: Any) -> Any:
    return smddp_work().SmddpWork(group._comm, [one()], (), group._ranks)


def raise_(error: BaseException) -> None:
    raise error


def connect(comm: Any) -> None:
    class Core:
        Comm = comm

    before, rendezvous.core = rendezvous.core, Core
    try:
        rendezvous.connect(None, "init", "failing", 0, 1, 1.0, None)
    finally:
        rendezvous.core = before


def test_the_classes_are_importable_under_their_printed_names():
    for name in [*NAMES, "ConfigError"]:
        shown = getattr(smddp, name)
        assert (shown.__module__, shown.__qualname__) == ("smddp", name)
        assert pickle.loads(pickle.dumps(shown)) is shown
    for name in NAMES:
        dressed = getattr(errors, name)
        assert (dressed.__module__, dressed.__qualname__) == ("smddp.torch.errors", name)
        assert issubclass(dressed, getattr(smddp, name)) and issubclass(dressed, dist.DistBackendError)
    assert issubclass(smddp.ConfigError, ValueError)


@on_ranks(1)
def test_every_entry_point_raises_the_documented_class_of_every_error():
    group: Any = dist.new_group([0])
    kind = SmddpProcessGroup
    collectives = {name for name in dir(kind) if hasattr(getattr(kind, name), "direct")}
    named = {getattr(kind, name) for name in CALLS}
    assert not [name for name in collectives if getattr(kind, name) not in named]
    comm, group._size, group._fast_path = group._comm, 2, None
    try:
        for name in NAMES:
            for entry, call in {**CALLS, **OTHERS}.items():
                error = getattr(smddp, name)("what happened")
                error.ranks = [0]
                group._comm = Failing(error)
                group._size = 1 if entry not in ("send", "recv") else 2
                smddp.torch.process_group._open[id(group)] = group
                with pytest.raises(dist.DistBackendError) as raised:
                    call(group)
                assert type(raised.value) is getattr(errors, name), (entry, name, raised.value)
                assert raised.value.ranks == [0], (entry, name)
    finally:
        group._comm, group._size = comm, 1


@on_ranks(2)
def test_a_mismatch_found_by_destroy_is_torchs_backend_error():
    group = dist.new_group([0, 1])
    with pytest.raises(dist.DistBackendError, match=r"does not match|differ") as raised:
        # Between nodes the call itself may receive the other rank's call and report the mismatch.
        dist.broadcast(torch.ones(1), dist.get_rank(), group=group)
        dist.destroy_process_group(group)
    assert type(raised.value) is errors.MismatchError
