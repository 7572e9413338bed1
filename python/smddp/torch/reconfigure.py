"""Reconfiguration of a group: other ranks in the same group object, after a failure or when ranks join.

Implements torch's contract for fault tolerance (`torch.distributed._reconfigure`, torch 2.15): every member publishes a
handle, the members agree on an unused number and on the handles of the new ranks, and each calls `reconfigure` with
them. The new communicator is separate: it receives no data of an earlier one. References to the group object
remain valid. In an older torch call the methods of the group.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
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
# Separates a group's name from the number of its configuration.
_AGAIN = " reconfigured "


@dataclass
class ReconfigureOptions:
    """Arguments of `reconfigure` for a torch without this class.

    uuid: 0 or more, unused in this group. handles: of all new ranks; a list defines their order, a set keeps the
    previous order. timeout: for the whole call; None: the group's timeout. hints: {"store": "HOST:PORT"} is the
    TCPStore for the rendezvous, if the group's store has failed.
    """

    uuid: int
    handles: Sequence[str] | set[str]
    timeout: timedelta | None = None
    hints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Handle:
    """Identifies a member to other ranks: its rank in the group and in the world, and its group object."""

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
        raise ValueError(f"reconfigure: invalid handle {text!r}: expected the result of _get_reconfigure_handle")


def instance() -> str:
    """Returns a unique name for a group object."""
    return secrets.token_hex(8)


def members(handles: Any, mine: str) -> list[Handle]:
    """Returns the new ranks in order. Raises ValueError unless the handles differ and include `mine`."""
    ordered = not isinstance(handles, (set, frozenset))
    found = [Handle.parse(handle) for handle in handles]
    if not ordered:
        found.sort()
    instances = [each.instance for each in found]
    if len(set(instances)) != len(instances):
        raise ValueError(f"reconfigure: duplicate handle in {[str(each) for each in found]}")
    if mine not in instances:
        raise ValueError(
            f"reconfigure: this member is not among the {len(found)} handles; only the new ranks call it, with all of "
            "their handles"
        )
    return found


def store_at(address: str, timeout: timedelta) -> Any:
    """Returns the TCPStore at "HOST:PORT". Raises ValueError for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"reconfigure: invalid hint store {address!r}: expected HOST:PORT")
    return TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def configuration_store(store: Any, uuid: int) -> Any:
    """Returns the store of one configuration, isolated from the keys of others by a prefix."""
    return PrefixStore(f"reconfigure/{uuid}", store)


def is_default_group(group: object) -> bool:
    return group is dist_c10d.GroupMember.WORLD


def update_torch_ranks(group: Any, ranks: list[Handle]) -> None:
    """Updates torch's table of a group's ranks. The ranks of the default group become the global ranks."""
    world = dist_c10d._world.pg_group_ranks
    if group in world:
        whole = is_default_group(group)
        world[group] = {place if whole else each.world_rank: place for place, each in enumerate(ranks)}


class Reconfigurable:
    """The part of a group that changes its ranks. The class that uses it sets the attributes below."""

    _comm: Any
    _rank: int
    _all_ranks: Sequence[int]
    _timeout: timedelta
    _group_store: Any
    _store: Any
    _mailbox: Any
    _others: Mapping[str, object]
    _request: Any
    # Unique name of this object, and the used reconfiguration numbers.
    _instance: str
    _uuids: set[int]
    _become: Callable[..., None]
    _connect: Callable[..., None]
    _hold: Callable[[Any], None]
    _opened: Callable[[], None]
    _move_observers: Callable[[], None]

    @property
    def supports_reconfigure(self) -> bool:
        """True: any group can be reconfigured; with enable_reconfigure it is created without ranks.

        Raises RuntimeError, as torch does, for a group whose devices have different backends.
        """
        if self._others:
            raise RuntimeError(
                "ProcessGroup reconfigure APIs do not support process groups with multiple backends: "
                f"{self._request.backends}"
            )
        return True

    def get_reconfigure_handle(self) -> str:
        """Returns the handle of this member, for `reconfigure` on all members."""
        assert self.supports_reconfigure
        world = dist_c10d.GroupMember.WORLD
        world_rank = self._rank if world is None or is_default_group(self) else world.rank()
        return str(Handle(self._rank, world_rank, self._instance))

    def reconfigure(self, opts: Any) -> Work:
        """Replaces the group's ranks by those of `opts`: torch's ReconfigureOptions, or smddp's class of that name.

        All new ranks call it with the same number and handles; pending operations fail. Returns a completed handle when
        the group is connected. Raises ValueError for invalid handles, RuntimeError for a used number,
        CollectiveTimeoutError with the missing ranks, TopologyError if a rank failed to connect, Error if the
        store fails. After the last three the group has no ranks until another call succeeds.
        """
        assert self.supports_reconfigure
        uuid = int(opts.uuid)
        ranks = members(opts.handles, self._instance)
        if uuid < 0:
            raise ValueError(f"reconfigure: invalid uuid {uuid}: expected 0 or more")
        if uuid in self._uuids:
            raise RuntimeError(f"reconfigure: uuid {uuid} was already used in this group; each call needs a new one")
        limit = opts.timeout if opts.timeout is not None else self._timeout
        hints = dict(opts.hints)
        at = hints.pop("store", None)
        if hints:
            raise ValueError(f"reconfigure: unknown hints {sorted(hints)}: expected store")
        store = configuration_store(self._group_store if at is None else self._store_at(at, limit), uuid)
        self._uuids.add(uuid)
        name = self._comm.name.partition(_AGAIN)[0]
        self._mailbox.close()
        self._hold(NotConfigured(name, f"has no ranks since its reconfiguration {uuid} failed"))
        place = next(place for place, each in enumerate(ranks) if each.instance == self._instance)
        whole = is_default_group(self)
        new_name = f"{name}{_AGAIN}{uuid}"
        self._become(new_name, place, len(ranks), [] if whole else [each.world_rank for each in ranks])
        self._connect(store, "reconfigure", new_name, limit)
        self._store = store
        update_torch_ranks(self, ranks)
        self._move_observers()
        self._opened()
        first_cause.clear()
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
        """Warns in an older torch, whose C++ code keeps the old number of ranks: DDP would scale gradients wrongly."""
        kept, now = ProcessGroup.size(self), len(self._all_ranks)  # type: ignore[arg-type]
        if kept != now:
            warnings.warn(
                f"reconfigure: torch {torch.__version__} continues with {kept} ranks where this group has {now} "
                f"now, and DistributedDataParallel would divide gradients by {kept}. Average them with "
                "all_reduce and ReduceOp.AVG, make a new group for DistributedDataParallel, or use a newer torch "
                "(2.15 asks the group)",
                RuntimeWarning,
                stacklevel=3,
            )
