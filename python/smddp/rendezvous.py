"""What ranks tell each other through torch's store: the cards of a new group, and monitored_barrier.

Keys live under the prefix that torch gives each group. A rank takes its own key away once all have read it,
so a later group of the same name over the same store never meets an old one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed import Store

from smddp._native import core
from smddp.errors import CollectiveTimeoutError, translate

_FIRST_PAUSE = 0.0002
_LONGEST_PAUSE = 0.02
# Seconds that a rank which cannot make a group waits for the others to find out, too.
_FAIL_TOGETHER = 2.0


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


def _read(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The values of keys that are all there, in one request where the store has one."""
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        return [bytes(value) for value in store.multi_get(list(keys))]
    return [bytes(store.get(key)) for key in keys]


def connect(store: Store, name: str, rank: int, size: int, timeout: float, global_ranks: Sequence[int] | None) -> Any:
    """Make this rank's communicator of the group `name`: one card out, all cards in.

    Raises CollectiveTimeoutError naming the (global) ranks whose card did not come within `timeout` seconds,
    TopologyError where ranks cannot reach each other or one of them could not make the group at all.
    """
    native = core()
    deadline = time.monotonic() + timeout
    table = _Table(store, rank, size)
    try:
        try:
            pending = native.PendingComm(name, rank, size, timeout)
            if size == 1:
                return pending.connect([pending.card()])
        except (native.Error, ValueError) as error:
            table.refuse(str(error))
            raise
        with table.entered(pending.card()):
            late = table.late(deadline)
            if late:
                ranks = [global_ranks[place] for place in late] if global_ranks else late
                error = CollectiveTimeoutError(
                    f"making group {name!r}: no card from {_named(ranks)} within the timeout of {timeout:g} s "
                    f"({size - len(late)} of {size} ranks came). Did all ranks of the group call "
                    "init_process_group or new_group, with the same arguments and in the same order?"
                )
                error.ranks = ranks
                raise error
            comm = pending.connect(table.cards(name))
            # Nobody passes before all have read all cards.
            comm.collective(8, 12, 0, 1.0, 0, None, None, None, max(deadline - time.monotonic(), 0.001), False)
    except native.Error as error:
        raise translate(error, global_ranks) from None
    return comm


class _Table:
    """The cards of one group's ranks in the store: each rank lays its own down and reads all."""

    _CARD, _REFUSAL = b"c", b"r"

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._size = size
        self._mine = f"smddp/card/{rank}"
        self._keys = [f"smddp/card/{other}" for other in range(size)]
        self._failed = [f"smddp/failed/{other}" for other in range(size)]
        self._rank = rank
        self._late: list[int] = []

    def refuse(self, why: str) -> None:
        """In place of a card, so that the others need not wait for one. They read it before this rank goes on."""
        if self._size == 1:
            return
        with suppress(RuntimeError):
            self._store.set(self._mine, self._REFUSAL + why.encode())
            self._fail_together()

    @contextmanager
    def entered(self, card: bytes) -> Iterator[None]:
        """This rank's card lies on the table."""
        self._store.set(self._mine, self._CARD + card)
        try:
            yield
        except (core().Error, ValueError):
            with suppress(RuntimeError):
                self._fail_together()
            raise
        finally:
            with suppress(RuntimeError):
                self._store.delete_key(self._mine)

    def late(self, deadline: float) -> list[int]:
        """Waits for all cards. Returns the ranks whose card is not there at the deadline."""
        self._late = missing(self._store, self._keys, deadline)
        return self._late

    def cards(self, name: str) -> list[bytes]:
        """All cards. Raises TopologyError with the reason of a rank that could not make the group."""
        found = _read(self._store, self._keys)
        for rank, card in enumerate(found):
            if card[:1] == self._REFUSAL:
                error = core().TopologyError(f"making group {name!r}: rank {rank} could not: {card[1:].decode()}")
                error.ranks = [rank]
                raise error
        return [card[1:] for card in found]

    def _fail_together(self) -> None:
        """Most reasons to fail hold for all ranks, and each is to raise its own error. So the first leaves the table
        only when the others have read its card: what follows is often the end of its process, and, with rank 0, of
        the store. The keys stay: all that one could do to a later group is to end a wait like this one.
        """
        self._store.set(self._failed[self._rank], "")
        others = [key for place, key in enumerate(self._failed) if place not in self._late]
        missing(self._store, others, time.monotonic() + _FAIL_TOGETHER)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


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
