"""Verdict of `smddp status`: sentences that name the call that waits, and the ranks that it waits for.

A pure function of the dumps of a job. Needs neither torch nor the core.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from smddp.observability import jobs, waits
from smddp.observability.jobs import Job
from smddp.observability.links import SlowLink
from smddp.observability.waits import Awaited, Wait
from smddp.text import named_ranks

#: Sentences of a verdict, named ranks of a sentence, and characters of one text of another process.
_MOST_SENTENCES, _MOST_RANKS, _MOST_TEXT = 5, 4, 160
#: Maximum cycles that are searched for. Each may contain all ranks.
_MOST_CYCLES = 64
_FRAME = re.compile(r"(.{1,300}?):(\d{1,9}) in (.{1,200})")


@dataclass
class Verdict:
    """State of a job in sentences, the most likely cause first."""

    sentences: list[str]
    #: True if a call has waited for the threshold or longer
    waits_long: bool


def of(job: Job, threshold: float) -> Verdict:
    """Returns the verdict of a job. threshold: seconds after which a pending call is reported as waiting."""
    found = waits.of(job)
    late = [wait for wait in found if wait.seconds >= threshold and wait.is_waited]
    cycles, explained = _cycles(late)
    blocked = {jobs.identity(one) for wait in late if wait.awaited for one in wait.waiting_processes()}
    first = [wait for wait in late if _is_cause(wait, blocked)]
    # Only the sentences that are shown are written: a job may have many thousand pending calls.
    lazy: list[Callable[[], str]] = [partial(_mismatch, wait) for wait in late if wait.mismatch]
    lazy += [partial(_cycle, steps) for steps in cycles]
    lazy += [partial(_sentence, wait) for wait in first if not wait.mismatch]
    failures = _failures(job)
    lazy += [] if failures is None else [failures.__str__]
    sentences = [write() for write in lazy[:_MOST_SENTENCES]]
    named = {id(wait) for wait in first} | {id(wait) for wait in late if wait.mismatch} | explained
    rest = sum(id(wait) not in named for wait in late)
    if len(lazy) > _MOST_SENTENCES:
        sentences.append(f"and {len(lazy) - _MOST_SENTENCES} more of this kind")
    if rest:
        calls = "1 more call waits" if rest == 1 else f"{rest} more calls wait"
        sentences.append(f"{calls} for ranks that are in these calls")
    if not late:
        sentences.insert(0, _calm(job, found, threshold))
    return Verdict([text[:2000] for text in sentences], bool(late))


def _is_cause(wait: Wait, blocked: set[tuple[Any, ...]]) -> bool:
    """Returns True unless all ranks that a call waits for wait in other calls themselves."""
    own = {jobs.identity(one) for one in wait.waiting}
    identities = (None if one.process is None else jobs.identity(one.process) for one in wait.awaited)
    return not wait.awaited or any(one is None or one not in blocked or one in own for one in identities)


def _sentence(wait: Wait) -> str:
    call = _call(wait)
    if not wait.awaited:
        if wait.unknown:
            ranks = f"{wait.unknown} of its {wait.size} ranks" if wait.sends is None else "its peer"
            return f"{call} has waited {_time(wait.seconds)}; the state of {ranks} is unknown"
        if wait.sends is None:
            return f"{call} has run for {_time(wait.seconds)}: all {wait.size} ranks are in it or have finished it"
        other = "the peer has the matching call" if "any rank" not in wait.call else "no matching send was made"
        return f"{call} has waited {_time(wait.seconds)}; {other}"
    # Silent ranks first, then ranks in no call.
    order = sorted(wait.awaited, key=lambda one: (one.silent is None, _present(one) is not None, one.rank))
    named = [f"{_name(one)}, which {_doing(one, wait)}" for one in order[:_MOST_RANKS]]
    count = len(wait.awaited)
    subject = "" if count == 1 else f"{count} of {wait.size} ranks: "
    more = f"; and {named_ranks(one.rank for one in order[_MOST_RANKS:])}" if count > _MOST_RANKS else ""
    return f"{call} has waited {_time(wait.seconds)} for {subject}{'; '.join(named)}{more}"


def _call(wait: Wait) -> str:
    on = "" if wait.sends is None else f" on {_rank(wait.waiting[0], wait.ranks[0])}"
    return f"{_short(wait.call)} of group `{_short(wait.group)}`{on}"


def _mismatch(wait: Wait) -> str:
    calls = [f"{_short(call)} on {named_ranks(ranks)}" for call, ranks in list(wait.mismatch.items())[:_MOST_RANKS]]
    return f"calls #{wait.number} of group `{_short(wait.group)}` differ: {'; '.join(calls)}"


def _failures(job: Job) -> str | None:
    found: dict[str, tuple[str, list[int], str]] = {}
    for process in job.processes:
        for group in process["groups"]:
            if group["error"]:
                entry = found.setdefault(jobs.key(group), (group["name"], [], group["error"]))
                entry[1].append(group["rank"])
    if not found:
        return None
    name, ranks, error = next(iter(found.values()))
    text = f"group `{_short(name)}` has failed on {named_ranks(ranks)}: {_short(error.partition(chr(10))[0], 2)}"
    # A program may keep its failed groups.
    return text if len(found) == 1 else f"{text}; {len(found) - 1} more groups have failed"


def _calm(job: Job, found: Sequence[Wait], threshold: float) -> str:
    hosts = {process["host"] for process in job.processes} | {one.member.host for one in job.silent}
    answered = len(job.processes)
    many = f"{answered} of {answered + len(job.silent)} processes answered, on {len(hosts)} host{'s'[: len(hosts) > 1]}"
    text = f"no call has waited for {threshold:g} s or longer ({many})"
    longest = next((wait for wait in found if wait.awaited and wait.seconds >= 0.1 and wait.is_waited), None)
    posted = [wait for wait in found if wait.seconds >= threshold and not wait.is_waited]
    if posted:
        calls = "1 call is" if len(posted) == 1 else f"{len(posted)} calls are"
        text += f"; {calls} pending without a thread that waits, the longest {_call(posted[0])}"
    return text if longest is None else f"{text}; the longest: {_sentence(longest)}"


_Process = tuple[Any, ...]
#: Late calls of each process, and its rank in them.
_Calls = dict[_Process, list[tuple[Wait, int]]]
#: Edge of the wait-for graph: its target, its call and rank or its awaited rank, and the edges from its target.
_Edge = tuple[Any, Any, Iterator[Any]]
#: A call, the rank in it, and a rank that it waits for.
_Step = tuple[Wait, int, Awaited]


def _cycles(late: Sequence[Wait]) -> tuple[list[list[_Step]], set[Any]]:
    """Returns cycles of ranks that wait for each other, and the ids of their calls.

    A depth-first search of the wait-for graph. Its nodes are processes and calls, so a call of many ranks that waits
    for many others has one edge for each of them. A node is in one returned cycle at most. A rank has no edge to a call
    in which no thread of it waits.
    """
    calls: _Calls = {}
    for wait in late:
        for process, rank, waited in zip(wait.waiting, wait.ranks, wait.waits):
            if waited is not False:
                calls.setdefault(jobs.identity(process), []).append((wait, rank))
    found: list[list[_Step]] = []
    explained: set[Any] = set()
    done: set[Any] = set()
    for start in calls:
        if start in done:
            continue
        # Each node with the edge that led to it and its remaining edges; the place of each node in the path.
        path: list[tuple[Any, Any, Iterator[_Edge]]] = [(start, None, _calls_of(start, calls))]
        places: dict[Any, int] = {start: 0}
        while path:
            edge = next(path[-1][2], None)
            if edge is None:
                node = path.pop()[0]
                del places[node]
                done.add(node)
            elif edge[0] in places:
                if edge[0] in explained or len(found) >= _MOST_CYCLES:
                    continue
                cycle = path[places[edge[0]] :]
                steps = _steps([one[1] for one in cycle[1:]] + [edge[1]])
                # A rank that has only a call to its own rank waits in no cycle.
                if len(steps) > 1:
                    found.append(steps)
                    explained |= {one[0] for one in cycle}
            elif edge[0] not in done:
                places[edge[0]] = len(path)
                path.append(edge)
    return found, explained


def _calls_of(process: _Process, calls: _Calls) -> Iterator[_Edge]:
    """Returns the edges from a process to its calls."""
    for wait, rank in calls[process]:
        yield id(wait), (wait, rank), _awaited_by(wait, calls)


def _awaited_by(wait: Wait, calls: _Calls) -> Iterator[_Edge]:
    """Returns the edges from a call to the processes that it waits for and that wait themselves."""
    for one in wait.awaited:
        process = None if one.process is None else jobs.identity(one.process)
        if process in calls:
            yield process, one, _calls_of(process, calls)


def _steps(edges: list[Any]) -> list[_Step]:
    """Returns the steps of a cycle from its edges, which alternate."""
    if isinstance(edges[0], Awaited):
        edges = [*edges[-1:], *edges[:-1]]
    return [(*call, one) for call, one in zip(edges[::2], edges[1::2])]


def _cycle(steps: Sequence[_Step]) -> str:
    """Returns the sentence of a cycle. Each step is a call, the rank in it, and a rank that it waits for."""
    inside = [wait.waiting[wait.ranks.index(rank)] for wait, rank, _ in steps]
    # The same cycle begins with the same rank in each query.
    first = min(range(len(steps)), key=lambda step: jobs.order(inside[step]))
    steps = [*steps[first:], *steps[:first]]
    text, shortest = _rank(inside[first], steps[0][1], True), min(wait.seconds for wait, _, _ in steps)
    for number, (wait, rank, one) in enumerate(steps[:8]):
        named = _rank(one.process, one.rank, number < len(steps) - 1)
        place = _place(wait.waiting[wait.ranks.index(rank)]["at"])
        text += f"{', which' if number else ''} waits in {_short(wait.call)} of group `{_short(wait.group)}` ({place})"
        text += f" for {named}"
    is_certain = all(wait.waits[wait.ranks.index(rank)] for wait, rank, _ in steps)
    unless = "" if is_certain else "; a rank whose call is asynchronous may be late instead"
    return f"ranks wait for each other since {_time(shortest)}: {text[: 1900 - len(unless)]}{unless}"


def _name(one: Awaited) -> str:
    if one.process is not None:
        return _rank(one.process, one.rank, True)
    if one.silent is not None:
        return _short(one.silent)
    return f"rank {one.rank}"


def _rank(process: dict[str, Any] | None, rank: int, place: bool = False) -> str:
    """Returns "rank 2 (host b, pid 4711)": the job's rank of a process, or its rank in the group."""
    if process is None:
        return f"rank {rank}"
    number = rank if process["rank"] is None else process["rank"]
    return f"rank {number}" + (f" (host {_short(process['host'])}, pid {process['pid']})" if place else "")


def _present(one: Awaited) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns the longest pending call in which a rank may wait, and its group."""
    groups = one.process["groups"] if one.process is not None else []
    calls = [(call, group) for group in groups for call in waits.pending(group) if waits.waits_in(call) is not False]
    return max(calls, key=lambda found: found[0]["seconds"], default=None)


def _doing(one: Awaited, wait: Wait) -> str:
    """Returns the state of a rank, for a relative clause."""
    if one.silent is not None:
        reason = _short(one.silent.reason)
        return f"is {reason}" if reason.startswith("stopped") else f"does not answer: {reason}"
    if one.process is None:
        return "could not be queried"
    text = ""
    if one.group is None:
        text = "has left the group and "
    elif one.group["error"]:
        text = f"has failed in the group ({_short(one.group['error'].partition(chr(10))[0])}) and "
    elif wait.sends is not None:
        text = f"has no matching {'recv' if wait.sends else 'send'} and "
    present = _present(one)
    if present is None:
        return f"{text}is {_place(one.process['at'])}"
    call, group = present
    inside = f"{_short(call['what'])} of group `{_short(group['name'])}` for {_time(call['seconds'])}"
    return f"{text}is in {inside}, {_place(one.process['at'])}"


def _place(at: str) -> str:
    """Returns "in read_batch at job.py:6" for "job.py:6 in read_batch < job.py:9 in main"."""
    frame = _FRAME.fullmatch(at.partition(" < ")[0])
    return f"in {_short(frame[3])} at {_short(frame[1])}:{frame[2]}" if frame else f"at {_short(at)}"


def _short(text: object, times: int = 1) -> str:
    shown, limit = str(text), _MOST_TEXT * times
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def as_json(job: Job, found: Verdict, slow: Sequence[SlowLink]) -> dict[str, Any]:
    """Returns the entry of a job in `smddp status --json`. slow: its slow links."""
    process = ("host", "pid", "rank")
    return {
        "verdict": found.sentences,
        "waits_long": found.waits_long,
        "processes": [{name: one[name] for name in process} for one in job.processes],
        "silent": [{**one.member._asdict(), "rank": one.rank, "reason": one.reason} for one in job.silent],
        "problems": job.problems,
        "slow_links": [asdict(one) for one in slow],
    }
