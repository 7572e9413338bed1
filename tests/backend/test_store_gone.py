"""Every operation that uses the store raises the library's error when the store's process has ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import on_ranks
from smddp.torch.reconfigure import ReconfigureOptions
from torch.distributed import distributed_c10d as dist_c10d

LIMIT = timedelta(seconds=6)


class Ending(dist.Store):
    """A store whose process ends after a number of requests."""

    def __init__(self, store: Any, requests: int) -> None:
        super().__init__()
        self._store, self._left = store, requests

    def _request(self, name: str, *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise dist.DistNetworkError("Connection was likely closed.\nException raised from recvBytes")
        return getattr(self._store, name)(*arguments)

    def set(self, key: str, value: Any) -> None:
        self._request("set", key, value)

    def get(self, key: str) -> Any:
        return self._request("get", key)

    def check(self, keys: Any) -> Any:
        return self._request("check", keys)

    def delete_key(self, key: str) -> Any:
        return self._request("delete_key", key)

    def wait(self, *arguments: Any) -> None:
        self._request("wait", *arguments)

    def add(self, key: str, amount: int) -> Any:
        return self._request("add", key, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


@contextlib.contextmanager
def default_store(store: Any) -> Iterator[None]:
    """Has torch make groups over this store."""
    known = dist_c10d._world.pg_map
    before, count = known[dist.group.WORLD], dist_c10d._world.group_count
    known[dist.group.WORLD] = (before[0], store)
    try:
        yield
    finally:
        known[dist.group.WORLD] = before
        # Ranks outside of the group have not counted it.
        dist_c10d._world.group_count = count


def new_group(store: Any, group: Any) -> object:
    with default_store(store):
        return dist.new_group([0, 1], timeout=LIMIT, use_local_synchronization=True)


def of_group(call: Callable[[Any], object]) -> Callable[[Any, Any], object]:
    def over(store: Any, group: Any) -> object:
        group._group_store = store
        return call(group)

    return over


def reconfigure(group: Any) -> object:
    handles: list[Any] = [None, None]
    dist.all_gather_object(handles, group.get_reconfigure_handle(), group=group)
    return group.reconfigure(ReconfigureOptions(1, handles, LIMIT))


def monitored(store: Any, group: Any) -> object:
    group._monitored._store = store
    return group.monitored_barrier(timedelta(seconds=0.5))


# By the operation as the error names it.
OPERATIONS: dict[str, Callable[[Any, Any], object]] = {
    "new_group": new_group,
    "split_group": of_group(lambda group: group.split_group([1, 0])),
    "shrink_group": of_group(lambda group: group.shrink([2])),
    "reconfigure": of_group(reconfigure),
    "monitored_barrier": monitored,
    "init": lambda store, group: smddp.init(dist.get_rank() % 2, 2, store=store, timeout=LIMIT),
}
# At once, and between two requests of an operation.
REQUESTS = (0, 3)


@on_ranks(3, seconds=110)
def test_every_operation_over_a_store_that_ends_raises_a_complete_error() -> None:
    real = dist.distributed_c10d._get_default_store()
    member = dist.get_rank() < 2
    for name, operation in OPERATIONS.items():
        for requests in REQUESTS:
            group = dist.new_group([0, 1, 2] if name == "shrink_group" else [0, 1], timeout=LIMIT)
            if member:
                store = Ending(dist.PrefixStore(f"{name} {requests}", real), requests)
                raised = None
                try:
                    operation(store, group)
                except smddp.Error as error:
                    raised = error
                except RuntimeError as error:
                    assert name == "monitored_barrier" and "monitoredBarrier" in str(error), error
                if requests == 0 and name != "monitored_barrier":
                    assert raised is not None, name
                if raised is not None and not isinstance(raised, smddp.CollectiveTimeoutError):
                    assert re.search(rf"{name}( #\d+)? on group `.*rank \d \(host .+, pid \d+\)", str(raised)), raised
                    assert "the store" in str(raised) and "recvBytes" not in str(raised), raised
                    if name != "init":
                        assert isinstance(raised, dist.DistBackendError), raised
            dist.barrier()
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == 3.0


@on_ranks(1)
def test_a_store_of_the_hints_that_does_not_answer_is_named() -> None:
    group = dist.new_group([0])
    handle = group.get_reconfigure_handle()
    options = ReconfigureOptions(1, [handle], timedelta(seconds=0.5), {"store": "127.0.0.1:1"})
    with pytest.raises(dist.DistBackendError, match=r"reconfigure on group .*rank 0 \(host .*store at 127.0.0.1:1"):
        group.reconfigure(options)
