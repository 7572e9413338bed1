"""Integers of any size as arguments: ValueError before anything moves, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

VALUES = [10**30, -(10**30), 2**64, 2**63, 2**63 - 1, -1]


def ones() -> Any:
    return numpy.ones(4, "float32")


def tensor() -> torch.Tensor:
    return torch.ones(4)


Calls = dict[str, Callable[[Any, int], object]]
# Every integer argument of the API without torch.
ARRAYS: Calls = {
    "broadcast root": lambda g, n: g.broadcast(ones(), n),
    "broadcast_object root": lambda g, n: g.broadcast_object(1, n),
    "reduce root": lambda g, n: g.reduce(ones(), "sum", n),
    "gather root": lambda g, n: g.gather(ones(), n),
    "scatter root": lambda g, n: g.scatter(ones(), ones(), n),
    "all_gather counts": lambda g, n: g.all_gather(ones(), counts=[n, n]),
    "reduce_scatter counts": lambda g, n: g.reduce_scatter(ones(), counts=[n, n]),
    "all_to_all sent": lambda g, n: g.all_to_all(ones(), counts=([n, n], [2, 2])),
    "all_to_all received": lambda g, n: g.all_to_all(ones(), counts=([2, 2], [n, n])),
    "send dst": lambda g, n: g.send(ones(), n),
    "send tag": lambda g, n: g.send(ones(), 1 - g.rank, n),
    "recv src": lambda g, n: g.recv(ones(), n),
    "recv tag": lambda g, n: g.recv(ones(), 1 - g.rank, n),
    "path nbytes": lambda g, n: g.path("all_reduce", n),
    "init rank": lambda g, n: smddp.init(n, 2, "127.0.0.1:1"),
    "init size": lambda g, n: smddp.init(0, n, "127.0.0.1:1"),
    "init port": lambda g, n: smddp.init(0, 2, "127.0.0.1", port=n),
}
# Every integer argument of torch's methods of the group.
TENSORS: Calls = {
    "send dst": lambda g, n: g.send([tensor()], n, 0),
    "send tag": lambda g, n: g.send([tensor()], 1, n),
    "recv src": lambda g, n: g.recv([tensor()], n, 0),
    "recv tag": lambda g, n: g.recv([tensor()], 1, n),
    "recv_anysource tag": lambda g, n: g.recv_anysource([tensor()], n),
    "own send tag": lambda g, n: g.send([tensor()], dist.get_rank(), n),
    "own recv tag": lambda g, n: g.recv([tensor()], dist.get_rank(), n),
    "all_to_all sent": lambda g, n: g.all_to_all_single(tensor(), tensor(), [2, 2], [n, n]),
    "all_to_all received": lambda g, n: g.all_to_all_single(tensor(), tensor(), [n, n], [2, 2]),
}
# Values that these arguments may have.
ALLOWED = {"tag": (2**63 - 1,), "nbytes": (2**63 - 1,)}


def check(calls: Calls, group: Any) -> None:
    for name, call in calls.items():
        for value in VALUES:
            if value not in ALLOWED.get(name.split()[-1], ()):
                with pytest.raises(ValueError) as caught:
                    call(group, value)
                assert type(caught.value) in (ValueError, smddp.ConfigError), (name, value, caught.value)


@on_ranks(2)
def test_numbers_out_of_range_are_value_errors_before_anything_moves() -> None:
    store = dist.distributed_c10d._get_default_store()
    with smddp.init(dist.get_rank(), 2, store=dist.PrefixStore("ranges", store)) as group:
        check(ARRAYS, group)
        for split in (lambda n: group.split(n), lambda n: group.split(0, n)):
            for value in (10**30, -(10**30), 2**63):
                with pytest.raises(ValueError, match="out of range"):
                    split(value)
        assert group.all_reduce(ones()).tolist() == [2.0] * 4
    check(TENSORS, dist.group.WORLD)
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == 2.0
