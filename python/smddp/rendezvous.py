"""What ranks tell each other through torch's store: how to make a new group, and monitored_barrier.

Keys live under the prefix that torch gives each group.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import Store

from smddp import stacks
from smddp._native import core
from smddp.errors import translate

_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.02


def missing(store: Store, keys: Sequence[str], deadline: float) -> list[int]:
    """Wait until all keys are there. Returns the places of those that are not, at the deadline.

    A store's own wait cannot be interrupted, so this asks again and again, with growing pauses that leave
    the server of a large world its breath.
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

    call: what the user called for it, as errors name it. known: the communicator of a group in which all of them are
    already, their ranks there, and the ranks there of all groups of the same mesh dimension (see `Comm.make`).
    Raises CollectiveTimeoutError naming the ranks that did not come within `timeout` seconds, PeerLostError naming one
    that came and is gone, TopologyError where ranks cannot reach each other or one of them could not make the group at
    all.
    """
    native = core()
    stacks.offer()
    try:
        return native.Comm.make(store, call, name, rank, size, timeout, known)
    except native.Error as error:
        raise translate(error, global_ranks) from None


class MonitoredBarrier:
    """Rank 0 of a group learns which ranks came; all others learn whether all did.

    It goes through the store, not through the group's own channels: ranks that do not come leave nothing
    behind that could disturb the group.
    """

    def __init__(self, store: Store, rank: int, size: int, global_ranks: Sequence[int] | None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._global_ranks = global_ranks or range(size)
        self._round = 0

    def __call__(self, timeout: float, wait_all_ranks: bool) -> None:
        """Raises RuntimeError in the words of torch's gloo backend, which its users and tests expect."""
        number = self._round
        self._round += 1
        if self._size == 1:
            return
        if self._rank == 0:
            self._collect(number, timeout, wait_all_ranks)
        else:
            self._report(number, timeout)

    def _key(self, number: int, rank: int) -> str:
        return f"smddp/monitored/{number}/{rank}"

    def _collect(self, number: int, timeout: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout
        keys = [self._key(number, rank) for rank in range(1, self._size)]
        me = self._global_ranks[0]
        milliseconds = round(timeout * 1000)
        if timeout <= 0:
            raise RuntimeError(
                f"Rank {me} timed out in monitoredBarrier after {milliseconds} ms.\n"
                "No ranks successfully processed in monitoredBarrier."
            )
        late = [self._global_ranks[place + 1] for place in missing(self._store, keys, deadline)]
        self._store.set(self._key(number, 0), "late" if late else "ok")
        for key in keys:
            self._clean(key)
        if not late:
            return
        if wait_all_ranks:
            raise RuntimeError(
                f"Ranks {', '.join(map(str, late))} failed to pass monitoredBarrier in {milliseconds} ms"
            )
        raise RuntimeError(f"Rank {late[0]} failed to pass monitoredBarrier in {milliseconds} ms")

    def _report(self, number: int, timeout: float) -> None:
        verdict = self._key(number, 0)
        self._store.set(self._key(number, self._rank), "here")
        # Rank 0 waits its own timeout for the slowest, so its word may come that much later.
        if missing(self._store, [verdict], time.monotonic() + 2 * timeout + 1):
            cause = f"no word from rank 0 within {2 * timeout + 1:g} s"
        elif bytes(self._store.get(verdict)) == b"ok":
            return
        else:
            cause = "rank 0 reported ranks that did not arrive"
        raise RuntimeError(
            f"Rank {self._global_ranks[self._rank]} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank {self._global_ranks[0]}. Please check rank {self._global_ranks[0]} logs "
            f"for faulty rank.\n Original exception: \n{cause}"
        )

    def _clean(self, key: str) -> None:
        with suppress(RuntimeError):
            self._store.delete_key(key)
