"""Group creation and monitored_barrier through torch's store.

Keys use the prefix that torch gives each group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import DistError, Store

from smddp._native import core
from smddp.observability import stacks
from smddp.text import first_line, this_rank
from smddp.torch.errors import CollectiveTimeoutError, Error, translated

_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.02
#: Seconds for which rank 0 waits until the other ranks have read its verdict.
_READ_SECONDS = 1.0
#: Errors of a store whose server has exited.
_STORE_ERRORS = (DistError, ConnectionError)


def missing(store: Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are set. Returns the indices of the keys missing at the deadline.

    A store's wait cannot be interrupted, so this polls. Growing pauses limit the load on the server.
    """
    pause = _FIRST_PAUSE
    longest = max(_LONGEST_PAUSE, len(keys) * 0.0002)
    waiting = list(range(len(keys)))
    while True:
        if store.check([keys[place] for place in waiting]):
            return []
        if time.monotonic() >= deadline:
            return [place for place in waiting if not store.check([keys[place]])]
        time.sleep(pause)
        pause = min(pause * 2, longest)


def connect(
    store: Store,
    call: str,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    global_ranks: Sequence[int] | None,
    known: tuple[Any, Sequence[int], Sequence[Sequence[int]]] | None = None,
) -> Any:
    """Make this rank's communicator of the group `name`.

    call: the user's call, for errors. known: the communicator of a group that contains all these ranks, their ranks
    there, and the ranks there of all groups of the same mesh dimension (see `Comm.make`).
    Raises CollectiveTimeoutError naming the ranks that did not join within `timeout` seconds, PeerLostError naming a
    rank lost after it joined, TopologyError if ranks cannot reach each other or a rank failed to create the group.
    """
    native = core()
    stacks.offer()
    with translated(global_ranks):
        return native.Comm.make(store, call, name, rank, size, timeout, known)


class MonitoredBarrier:
    """Barrier that reports the missing ranks on rank 0, and success or failure on all other ranks.

    It uses the store instead of the group's channels, so missing ranks leave the group usable. If the store's process
    has exited, it uses the group's barrier; then a missing rank ends the group, as in any collective.

    name: the group's, for errors. barrier: the group's own barrier, with a deadline in seconds.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        global_ranks: Sequence[int] | None,
        barrier: Callable[[float], None],
    ) -> None:
        self._store = store
        self._name = name
        self._barrier = barrier
        self._rank = rank
        self._size = size
        self._global_ranks = global_ranks or range(size)
        self._round = 0

    def __call__(self, timeout: float, wait_all_ranks: bool) -> None:
        """Raises RuntimeError with the text of torch's gloo backend, which users and tests expect; Error if the store
        exits during the call."""
        number = self._round
        self._round += 1
        if self._rank == 0 and timeout <= 0:
            raise RuntimeError(
                f"Rank {self._global_ranks[0]} timed out in monitoredBarrier after {round(timeout * 1000)} ms.\n"
                "No ranks successfully processed in monitoredBarrier."
            )
        if self._size == 1:
            return
        try:
            self._check_in(number)
        except RuntimeError:
            self._without_store(timeout, wait_all_ranks)
            return
        try:
            if self._rank == 0:
                self._collect(number, timeout, wait_all_ranks)
            else:
                self._report(number, timeout)
        except _STORE_ERRORS as error:
            me = this_rank(self._global_ranks[self._rank])
            raise Error(
                f"monitored_barrier on group `{self._name}` failed: {me} cannot use the store "
                f"({first_line(error)}). The process that serves it has ended; the next call does without it"
            ) from error

    def _check_in(self, number: int) -> None:
        """Raises RuntimeError if the store has exited."""
        if self._rank != 0:
            self._store.set(self._key(number, self._rank), "here")
        # set() has no reply and fails silently right after the server exits; check() detects that.
        self._store.check([self._key(number, self._rank)])

    def _without_store(self, timeout: float, wait_all_ranks: bool) -> None:
        try:
            self._barrier(timeout if self._rank == 0 else 2 * timeout + 1)
        except CollectiveTimeoutError as error:
            if self._rank != 0:
                raise self._failed(str(error)) from error
            raise self._late(error.ranks, timeout, wait_all_ranks) from error

    def _key(self, number: int, rank: int, what: str = "here") -> str:
        return f"smddp/monitored/{number}/{rank}/{what}"

    def _collect(self, number: int, timeout: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout
        keys = [self._key(number, rank) for rank in range(1, self._size)]
        try:
            late = [self._global_ranks[place + 1] for place in missing(self._store, keys, deadline)]
        except BaseException as error:
            # The other ranks would wait for the verdict until their deadline.
            with suppress(RuntimeError):
                self._store.set(self._key(number, 0), f"rank 0 left the call ({type(error).__name__})")
            raise
        self._store.set(self._key(number, 0), "rank 0 reported ranks that did not arrive" if late else "ok")
        for key in keys:
            self._clean(key)
        if late:
            raise self._late(late, timeout, wait_all_ranks)
        # The store's process may be this one, and exit next.
        read = [self._key(number, rank, "read") for rank in range(1, self._size)]
        with suppress(RuntimeError):
            missing(self._store, read, time.monotonic() + _READ_SECONDS)
            for key in read:
                self._clean(key)

    def _late(self, ranks: Sequence[int], timeout: float, wait_all_ranks: bool) -> RuntimeError:
        milliseconds = round(timeout * 1000)
        if wait_all_ranks or not ranks:
            return RuntimeError(
                f"Ranks {', '.join(map(str, ranks))} failed to pass monitoredBarrier in {milliseconds} ms"
            )
        return RuntimeError(f"Rank {ranks[0]} failed to pass monitoredBarrier in {milliseconds} ms")

    def _report(self, number: int, timeout: float) -> None:
        verdict = self._key(number, 0)
        # Rank 0 waits up to its timeout for the slowest rank, so its verdict may arrive that much later.
        if missing(self._store, [verdict], time.monotonic() + 2 * timeout + 1):
            cause = f"no word from rank 0 within {2 * timeout + 1:g} s"
        elif (cause := bytes(self._store.get(verdict)).decode()) == "ok":
            with suppress(RuntimeError):
                self._store.set(self._key(number, self._rank, "read"), "yes")
            return
        raise self._failed(cause)

    def _failed(self, cause: str) -> RuntimeError:
        return RuntimeError(
            f"Rank {self._global_ranks[self._rank]} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank {self._global_ranks[0]}. Please check rank {self._global_ranks[0]} logs "
            f"for faulty rank.\n Original exception: \n{cause}"
        )

    def _clean(self, key: str) -> None:
        with suppress(RuntimeError):
            self._store.delete_key(key)
