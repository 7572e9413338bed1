"""Groups that live on: other ranks under the same group object, after a death or when ranks join.

torch's contract for fault tolerance (`torch.distributed._reconfigure`, from torch 2.15 on): every member shows a
handle, the members agree by whatever way they have on a number that was not used before and on the handles of those who
go on, and each calls `reconfigure` with them. What is made is a communicator of its own: nothing that was sent in an
earlier one can arrive in it. The group object stays, with all that holds it. In an older torch the methods are called
on the group.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroup, TCPStore, Work
from torch.distributed import distributed_c10d as dist_c10d

from smddp.exit_hooks import first_cause
from smddp.text import first_line, this_rank
from smddp.torch.errors import Error
from smddp.torch.placeholders import NotConfigured
from smddp.torch.work import DoneWork

_KIND = "smddp"
# Between a group's name and the number of its present configuration.
_AGAIN = " reconfigured "


@dataclass
class ReconfigureOptions:
    """What `reconfigure` takes, for a torch that has no class of this name.

    uuid: 0 or more, not used before in this group. handles: of all ranks that go on; a list is in the order of their
    ranks, of a set the ranks keep the order that they have. timeout: for all of it; None: the group's. hints:
    {"store": "HOST:PORT"} is a TCPStore to meet at, where the store that the group was made with is gone.
    """

    uuid: int
    handles: Sequence[str] | set[str]
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Handle:
    """A member as others name it: where it stands in the group and in the world, and which object of which process."""

    rank: int
    world_rank: int
    instance: str

    def __str__(self) -> str:
        return f"{_KIND}:{self.rank}:{self.world_rank}:{self.instance}"

    @classmethod
    def parse(cls, text: str) -> Handle:
        parts = str(text).split(":")
        try:
            if len(parts) == 4 and parts[0] == _KIND and parts[3]:
                return cls(int(parts[1]), int(parts[2]), parts[3])
        except ValueError:
            pass
        raise ValueError(f"reconfigure: {text!r} is no handle of a smddp group; use what _get_reconfigure_handle gives")


def instance() -> str:
    """A name for one group object among all that any process ever has."""
    return secrets.token_hex(8)


def members(handles: Any, mine: str) -> list[Handle]:
    """The ranks that go on, in their new order. Raises ValueError for anything else than different handles, one of them
    `mine`."""
    ordered = not isinstance(handles, (set, frozenset))
    found = [Handle.parse(handle) for handle in handles]
    if not ordered:
        found.sort()
    instances = [each.instance for each in found]
    if len(set(instances)) != len(instances):
        raise ValueError(f"reconfigure: a member is named twice in {[str(each) for each in found]}")
    if mine not in instances:
        raise ValueError(
            f"reconfigure: this member is not among the {len(found)} handles; only those that go on call it, with the "
            "handle of each of them"
        )
    return found


def store_at(address: str, timeout: timedelta) -> Any:
    """The TCPStore at "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"reconfigure: the hint store is HOST:PORT, not {address!r}")
    return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def meeting_place(store: Any, uuid: int) -> Any:
    """Where the members of one configuration meet: no key of another one is seen there."""
    return PrefixStore(f"reconfigure/{uuid}", store)


def tell_torch(group: Any, ranks: list[Handle]) -> None:
    """Put a group's new ranks where torch keeps them. Those of the group of all ranks are the world's from now on."""
    world = dist_c10d._world.pg_group_ranks
    if group in world:
        whole = group is dist_c10d.GroupMember.WORLD
        world[group] = {place if whole else each.world_rank: place for place, each in enumerate(ranks)}


class Reconfigurable:
    """The part of a group that gives it other ranks. The class that uses it sets the attributes below."""

    _comm: Any
    _rank: int
    _all_ranks: Sequence[int]
    _timeout: timedelta
    _group_store: Any
    _store: Any
    _mailbox: Any
    _others: dict[str, Any]
    _request: Any
    # This object's name among all, and the numbers that it was reconfigured by.
    _instance: str
    _uuids: set[int]
    _become: Callable[..., None]
    _connect: Callable[..., None]
    _hold: Callable[[Any], None]
    _opened: Callable[[], None]
    _listen_anew: Callable[[], None]

    @property
    def supports_reconfigure(self) -> bool:
        """Any group can go on with other ranks; enable_reconfigure makes one that waits for its first.

        Raises RuntimeError, as torch does, for a group whose devices have different backends.
        """
        if self._others:
            raise RuntimeError(
                "ProcessGroup reconfigure APIs do not support process groups with multiple backends: "
                f"{self._request.backends}"
            )
        return True

    def get_reconfigure_handle(self) -> str:
        """What names this member to the others, for their `reconfigure`."""
        assert self.supports_reconfigure
        world = dist_c10d.GroupMember.WORLD
        world_rank = self._rank if world is None or world is self else world.rank()
        return str(Handle(self._rank, world_rank, self._instance))

    def reconfigure(self, opts: Any) -> Work:
        """Go on with the ranks that `opts` names: torch's ReconfigureOptions, or smddp's own of that name.

        All of them call it, with the same number and handles; what was under way ends with an error. Returns when the
        group is made, as a handle that is done. Raises ValueError for handles that make no group, RuntimeError for a
        number that was used before, CollectiveTimeoutError naming those who did not come, TopologyError where one could
        not make it, Error where the store does not work; the group is then without ranks, and another call may give it
        some.
        """
        assert self.supports_reconfigure
        uuid = int(opts.uuid)
        ranks = members(opts.handles, self._instance)
        if uuid < 0:
            raise ValueError(f"reconfigure: the uuid is 0 or more, not {uuid}")
        if uuid in self._uuids:
            raise RuntimeError(f"reconfigure: uuid {uuid} was already used in this group; each call needs a new one")
        limit = opts.timeout if opts.timeout is not None else self._timeout
        hints = dict(opts.hints)
        at = hints.pop("store", None)
        if hints:
            raise ValueError(f"reconfigure: unknown hints {sorted(hints)}; smddp knows store")
        store = meeting_place(self._group_store if at is None else self._store_at(at, limit), uuid)
        self._uuids.add(uuid)
        name = self._comm.name.partition(_AGAIN)[0]
        self._mailbox.close()
        self._hold(NotConfigured(name, f"has no ranks since its reconfiguration {uuid} failed"))
        place = next(place for place, each in enumerate(ranks) if each.instance == self._instance)
        whole = self is dist_c10d.GroupMember.WORLD
        new_name = f"{name}{_AGAIN}{uuid}"
        self._become(new_name, place, len(ranks), [] if whole else [each.world_rank for each in ranks])
        self._connect(store, "reconfigure", new_name, limit)
        self._store = store
        tell_torch(self, ranks)
        self._listen_anew()
        self._opened()
        first_cause.overcome()
        self._warn_of_torchs_size()
        return DoneWork([])

    def _store_at(self, address: str, timeout: timedelta) -> Any:
        try:
            return store_at(address, timeout)
        except DistError as error:
            me = this_rank(self._all_ranks[self._rank])
            raise Error(
                f"reconfigure on group `{self._comm.name}` failed: {me} cannot connect to the store at {address} "
                f"({first_line(error)}). Serve a TCPStore there, or name another one in hints"
            ) from error

    def _warn_of_torchs_size(self) -> None:
        """An older torch has the number of ranks in C++ and asks nobody again: DDP would scale gradients wrongly."""
        kept, now = ProcessGroup.size(self), len(self._all_ranks)  # type: ignore[arg-type]
        if kept != now:
            warnings.warn(
                f"reconfigure: torch {torch.__version__} goes on with {kept} ranks where this group has {now} "
                f"now, and DistributedDataParallel would divide gradients by {kept}. Average them with "
                "all_reduce and ReduceOp.AVG, make a new group for DistributedDataParallel, or use a newer torch "
                "(2.15 asks the group)",
                RuntimeWarning,
                stacklevel=3,
            )
