"""Jobs: processes that are connected by common groups, on one host or several. Needs neither torch nor the core."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from smddp.observability import dumps

#: Parses the description of a member. Its numbers are of limited length, because another process wrote the text.
_MEMBER = re.compile(r"rank \d{1,9} \(host (.{0,300}), pid (\d{1,9})\)", re.DOTALL)


class Member(NamedTuple):
    """Process of a rank, as its group knows it."""

    host: str
    pid: int


@dataclass
class Silent:
    """A process of a job that did not answer."""

    member: Member
    #: "stopped ...", "no reply within 2 s ..."
    reason: str
    #: its rank in each known group, by the group's key; `Job.add_group` adds groups that become known later
    ranks: dict[str, int]

    @property
    def rank(self) -> int | None:
        """Its rank in the first known group."""
        return next(iter(self.ranks.values()), None)

    def __str__(self) -> str:
        where = f"host {self.member.host}, pid {self.member.pid}"
        return where if self.rank is None else f"rank {self.rank} ({where})"


@dataclass
class Job:
    """The processes of one job: the dumps of the answers, this host's first, and the processes without an answer."""

    processes: list[dict[str, Any]]
    #: processes of the ranks of each group, by the group's key and the rank
    members: dict[str, dict[int, Member]] = field(default_factory=dict)
    #: reasons why ranks of other hosts were not queried
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._identities = {identity(one) for one in self.processes}
        self._by_member = {Member(one["host"], one["pid"]): one for one in self.processes}
        self._ranks_of: dict[Member, dict[str, int]] = {}
        self._silent: dict[Member, Silent] = {}

    @property
    def silent(self) -> list[Silent]:
        """The processes without an answer."""
        return list(self._silent.values())

    def find(self, member: Member) -> dict[str, Any] | None:
        """Returns the dump of that process, or None if it did not answer."""
        return self._by_member.get(member)

    def find_silent(self, member: Member) -> Silent | None:
        """Returns the process if it did not answer."""
        return self._silent.get(member)

    def has_member(self, member: Member) -> bool:
        """Returns True if that process has a rank in a known group."""
        return bool(self._ranks_of.get(member))

    def add_group(self, name: str, members: dict[int, Member]) -> None:
        """Sets the members of a group by rank. name: its key."""
        for member in self.members.get(name, {}).values():
            self._ranks_of[member].pop(name, None)
        self.members[name] = members
        for rank, member in members.items():
            self._ranks_of.setdefault(member, {})[name] = rank

    def add(self, found: dict[str, Any]) -> None:
        """Adds the dump of a process, unless the job already has it."""
        member = Member(found["host"], found["pid"])
        # A process may answer only the second query.
        self._silent.pop(member, None)
        if identity(found) not in self._identities:
            self._identities.add(identity(found))
            self._by_member[member] = found
            self.processes.append(found)

    def add_silent(self, member: Member, reason: str) -> None:
        """Adds a process without an answer. A later reason replaces an earlier one."""
        if self.find(member) is not None:
            return
        self._silent[member] = Silent(member, reason, self._ranks_of.setdefault(member, {}))

    def missing(self, process: dict[str, Any]) -> bool:
        """Returns True if that process can answer for a rank whose state is unknown."""
        known = Counter(name for name, _ in set(self._ranks()))
        groups = [group for group in process["groups"] if group.get("id") and key(group) not in self.members]
        return any(group["size"] > known[key(group)] for group in groups)

    def _ranks(self) -> Iterator[tuple[str, int]]:
        for one in self.processes:
            for group in one["groups"]:
                yield key(group), group["rank"]


def identity(process: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the identity of a process: its random id, or host and pid in dumps of older versions."""
    return (process["process"],) if process.get("process") else (process["host"], process["pid"])


def order(process: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the sort key of a process: ranks of the job first, in their order."""
    return (process["rank"] is None, process["rank"] or 0, process["host"], process["pid"])


def key(group: dict[str, Any]) -> str:
    """Returns the identity of a group in its job; name and size in dumps of older versions."""
    return group.get("id") or f"{group['name']} {group['size']}"


def of(answers: Iterable[dict[str, Any]], parent: Callable[[dict[str, Any]], str]) -> list[Job]:
    """Groups processes into jobs: by the identities of their groups, or by parent for processes without one."""
    jobs: list[tuple[set[str], list[dict[str, Any]]]] = []
    for one in answers:
        ids = {f"group {group['id']}" for group in one.get("groups", ()) if group.get("id")}
        ids = ids or {f"parent {parent(one)}"}
        joined = [job for job in jobs if job[0] & ids]
        jobs = [job for job in jobs if not job[0] & ids]
        keys = ids.union(*(job[0] for job in joined))
        jobs.append((keys, [process for job in joined for process in job[1]] + [one]))
    return [Job(processes) for _, processes in jobs]


def merge(job: Job, answer: Any) -> None:
    """Adds the answer to a job query. Raises ValueError if the answer has another format.

    A malformed reply of one process makes that process silent.
    """
    dumps.check(answer, _ANSWER)
    for group in answer["groups"]:
        found = (_MEMBER.fullmatch(name) for name in group["members"])
        job.add_group(key(group), {rank: Member(one[1], int(one[2])) for rank, one in enumerate(found) if one})
    for silent in answer["silent"]:
        member = job.members.get(silent["group"] or "", {}).get(silent["rank"])
        if member is not None:
            job.add_silent(member, silent["reason"])
    for reply in answer["answers"]:
        member = job.members.get(reply["group"] or "", {}).get(reply["rank"])
        try:
            found_process = dumps.parse(reply["text"], operations=False)
            if member is not None and (found_process["host"], found_process["pid"]) != member:
                raise ValueError(f"its answer is of host {found_process['host'][:80]}, pid {found_process['pid']}")
            job.add(found_process)
        except ValueError as error:
            if member is not None:
                job.add_silent(member, f"no answer: {error}")


def complete(job: Job, ask: Callable[[dict[str, Any]], Any], seconds: float) -> None:
    """Queries ranks of other hosts through processes of this host, until the members of all their groups are known.

    ask: sends a job query to a process of this host. seconds: time after which no further process is asked.
    """
    until = time.monotonic() + seconds
    failed: dict[str, list[int]] = {}
    for process in sorted(job.processes, key=lambda one: -max((group["size"] for group in one["groups"]), default=0)):
        if time.monotonic() >= until or not job.missing(process):
            continue
        try:
            merge(job, ask(process))
        except (OSError, ValueError) as error:
            failed.setdefault(str(error)[:200], []).append(process["pid"])
    for reason, pids in failed.items():
        name = f"pid {pids[0]}" if len(pids) == 1 else f"pid {pids[0]} and {len(pids) - 1} more processes"
        job.problems.append(f"{name} cannot query the other hosts: {reason}")


_ANSWER = {
    "groups": [{"name": str, "id": dumps.or_null(str), "rank": int, "size": int, "members": [str]}],
    "answers": [{"group": dumps.or_null(str), "rank": int, "text": str}],
    "silent": [{"group": dumps.or_null(str), "rank": int, "reason": str}],
}
