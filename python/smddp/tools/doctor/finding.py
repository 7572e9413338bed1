"""A finding, and the register of the checks that make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Facts = Mapping[str, Any]
OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """What one check says."""

    status: str
    #: What was found, a line.
    found: str
    #: What that means for a job, and what to do about it; empty where all is well.
    means: str = ""
    do: str = ""
    name: str = ""
    #: The ranks that it is about, of those that came; all of them where it is about the job.
    ranks: tuple[int, ...] = ()


def ok(found: str) -> Finding:
    return Finding(OK, found)


def warn(found: str, means: str, do: str) -> Finding:
    return Finding(WARN, found, means, do)


def fail(found: str, means: str, do: str) -> Finding:
    return Finding(FAIL, found, means, do)


OfRank = Callable[[Facts], Finding]
OfJob = Callable[[Facts], Finding]
#: By name, in the order in which they are told.
OF_RANK: dict[str, OfRank] = {}
OF_JOB: dict[str, OfJob] = {}


def of_rank(name: str) -> Callable[[OfRank], OfRank]:
    """Registers a check of one rank's facts (see facts.collect) under the name that its line has."""

    def register(check: OfRank) -> OfRank:
        OF_RANK[name] = check
        return check

    return register


def of_job(name: str) -> Callable[[OfJob], OfJob]:
    """Registers a check of the whole job: {"size", "missing" ranks, "came": facts by rank, "group", "pairs"}."""

    def register(check: OfJob) -> OfJob:
        OF_JOB[name] = check
        return check

    return register


def judge(job: Facts) -> list[Finding]:
    """The findings of all checks over a job's facts; the same finding on several ranks is one."""
    came: Mapping[int, Facts] = job["came"]
    told: list[Finding] = []
    for name, of_one in OF_RANK.items():
        same: dict[Finding, list[int]] = {}
        for rank, facts in came.items():
            same.setdefault(_asked(name, of_one, facts), []).append(rank)
        told += [replace(finding, ranks=tuple(ranks)) for finding, ranks in same.items()]
    for name, of_all in OF_JOB.items():
        told.append(replace(_asked(name, of_all, job), ranks=tuple(came)))
    return told


def _asked(name: str, check: Callable[[Facts], Finding], facts: Facts) -> Finding:
    try:
        finding = check(facts)
    except Exception as error:  # a machine stranger than a check expects keeps no other check from being told
        finding = warn(
            f"could not be judged: {type(error).__name__}: {error}", "this check says nothing", "report this"
        )
    return replace(finding, name=name)
