"""Pending calls of a job and the ranks that they wait for, from the dumps of its processes.

A collective waits for the ranks that have not begun it. A send or recv waits for its peer, unless the peer has the
matching call. A pending call in which no thread waits, such as a posted receive, blocks no rank. Needs neither torch
nor the core.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from smddp.observability import jobs
from smddp.observability.jobs import Job, Member, Silent

#: Groups that claim to have more ranks than this are not searched for unknown ranks.
_MOST_RANKS = 1 << 20
#: Seconds after which a process has registered the wait of a thread. A younger call may have one already.
_REGISTRATION = 1.0


@dataclass
class Awaited:
    """A rank that a call waits for: its dump, or its process without an answer, or neither."""

    #: rank in the group
    rank: int
    process: dict[str, Any] | None = None
    #: the group in its dump; None if it has left the group
    group: dict[str, Any] | None = None
    silent: Silent | None = None
    member: Member | None = None


@dataclass
class Wait:
    """A pending call of some ranks of a group."""

    seconds: float
    group: str
    size: int
    #: "all_reduce #61", "recv #1 from rank 1", and the number
    call: str
    number: int
    #: dumps of the ranks in the call, and these ranks in the group
    waiting: list[dict[str, Any]]
    ranks: list[int]
    #: for each of these ranks: True if a thread waits in the call, None if unknown
    waits: list[bool | None]
    awaited: list[Awaited] = field(default_factory=list)
    #: True for a send, False for a recv, None for a collective
    sends: bool | None = None
    #: ranks in the group whose state is unknown, because no process of theirs was queried
    unknown: int = 0
    #: calls that differ, each with its ranks in the group
    mismatch: dict[str, list[int]] = field(default_factory=dict)

    @property
    def is_waited(self) -> bool:
        """False if certainly no thread waits in the call."""
        return any(one is not False for one in self.waits)

    def waiting_processes(self) -> Iterator[dict[str, Any]]:
        """Returns the dumps of the ranks that may wait in the call."""
        return (one for one, waits in zip(self.waiting, self.waits) if waits is not False)


@dataclass
class _Group:
    name: str
    size: int
    #: dump of the process and of the group, by rank in the group
    ranks: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)


def of(job: Job) -> list[Wait]:
    """Returns the pending calls of a job, the longest first."""
    found = [wait for key, group in _groups(job).items() for wait in _of_group(job, key, group)]
    return sorted(found, key=lambda wait: -wait.seconds)


def pending(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the pending calls in a group's dump, the oldest first; of older versions only the longest."""
    if "pending" in group:
        calls: list[dict[str, Any]] = group["pending"]
        return calls
    present = group["present"]
    number = re.search(r"#(\d{1,18})", present["what"]) if present else None
    if present is None or number is None or present["algorithm"] is None:
        return []
    what, seconds = present["what"], present["seconds"]
    return [{"seq": int(number[1]), "what": what, "call": what, "seconds": seconds, "message": None}]


def waits_in(call: dict[str, Any]) -> bool | None:
    """Returns whether a thread waits in a pending call; None if unknown, as in dumps of older versions."""
    found: bool | None = call.get("waits")
    return None if found is False and call["seconds"] < _REGISTRATION else found


def _seconds(call: dict[str, Any]) -> float:
    """Returns the duration of the wait in a pending call, or the age of the call."""
    waited: float | None = call.get("waited_seconds")
    return float(call["seconds"]) if waited is None else waited


def _groups(job: Job) -> dict[str, _Group]:
    groups: dict[str, _Group] = {}
    for process in job.processes:
        for group in process["groups"]:
            one = groups.setdefault(jobs.key(group), _Group(group["name"], group["size"]))
            one.ranks.setdefault(group["rank"], (process, group))
    return groups


def _of_group(job: Job, key: str, group: _Group) -> Iterator[Wait]:
    if not any(pending(dumped) for _, dumped in group.ranks.values()):
        return
    others = {one.rank: one for one in _others(job, key, group)}
    collective = _collective(group, others)
    if collective is not None:
        yield collective
    yield from _messages(group, others)


def _others(job: Job, key: str, group: _Group) -> Iterable[Awaited]:
    """Returns the ranks of a group that have no dump with this group."""
    members = job.members.get(key, {})
    for rank in sorted(members.keys() - group.ranks.keys()):
        member = members[rank]
        silent = job.find_silent(member)
        yield Awaited(rank, None if silent else job.find(member), None, silent, member)


def _collective(group: _Group, others: dict[int, Awaited]) -> Wait | None:
    """Returns the first pending collective of a group."""
    calls = {
        rank: call
        for rank, (_, dumped) in group.ranks.items()
        if (call := next((call for call in pending(dumped) if call["message"] is None), None)) is not None
    }
    if not calls:
        return None
    seq = min(call["seq"] for call in calls.values())
    inside = {rank: call for rank, call in sorted(calls.items()) if call["seq"] == seq}
    awaited = [
        Awaited(rank, *found)
        for rank, found in sorted(group.ranks.items())
        if rank not in inside and _begun(found[1]) <= seq and found[1].get("recorded", True)
    ]
    awaited += [one for one in others.values() if one.silent is not None or one.process is not None]
    kinds: dict[str, list[int]] = {}
    for rank, call in inside.items():
        kinds.setdefault(_kind(call), []).append(rank)
    states = [waits_in(call) for call in inside.values()]
    # Calls in which a thread waits determine the duration.
    waited = [call for call, state in zip(inside.values(), states) if state is not False] or [*inside.values()]
    return Wait(
        max(_seconds(call) for call in waited),
        group.name,
        group.size,
        next(iter(inside.values()))["what"],
        seq,
        [group.ranks[rank][0] for rank in inside],
        list(inside),
        states,
        awaited,
        None,
        _unknown(group, awaited),
        kinds if len(kinds) > 1 else {},
    )


def _kind(call: dict[str, Any]) -> str:
    """Returns what must be equal on all ranks. Those of an all_to_all may give different sizes."""
    return call["what"] if call["what"].startswith("all_to_all") else call["call"]


def _begun(group: dict[str, Any]) -> int:
    calls = [call["seq"] + 1 for call in pending(group) if call["message"] is None]
    return max(group.get("submitted", 0), group.get("finished", 0), *calls, 0)


def _unknown(group: _Group, awaited: list[Awaited]) -> int:
    outside = sum(one.group is None for one in awaited)
    unrecorded = sum(not dumped.get("recorded", True) for _, dumped in group.ranks.values())
    return max(min(group.size, _MOST_RANKS) - len(group.ranks) - outside, 0) + unrecorded


def _messages(group: _Group, others: dict[int, Awaited]) -> Iterator[Wait]:
    posted = {rank: {*_posted(dumped)} for rank, (_, dumped) in group.ranks.items()}
    for rank, (process, dumped) in sorted(group.ranks.items()):
        for call in pending(dumped):
            message = call["message"]
            if message is None:
                continue
            peer = message["peer"]
            found = group.ranks.get(peer)
            awaited = [Awaited(peer, *found)] if found else [others[peer]] if peer in others else []
            matching = [(not message["sends"], other, _tag(message)) for other in (rank, None)]
            if found and not posted[peer].isdisjoint(matching):
                awaited = []
            unknown = int(peer is not None and found is None and not awaited)
            yield Wait(
                _seconds(call),
                group.name,
                group.size,
                call["what"],
                call["seq"],
                [process],
                [rank],
                [waits_in(call)],
                awaited,
                message["sends"],
                unknown,
            )


def _posted(group: dict[str, Any]) -> Iterator[tuple[bool, int | None, int | None]]:
    """Returns direction, peer and tag of the pending messages of a rank."""
    messages = (call["message"] for call in pending(group))
    return ((one["sends"], one["peer"], _tag(one)) for one in messages if one is not None)


def _tag(message: dict[str, Any]) -> int | None:
    tag = message.get("tag")
    return tag if isinstance(tag, int) else None
