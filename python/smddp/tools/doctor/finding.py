"""Findings, and the registry of checks that produce them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Facts = Mapping[str, Any]
OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    status: str
    #: Observed facts, one line.
    found: str
    #: Effect on a job and remedy; empty if the check passes.
    means: str = ""
    do: str = ""
    name: str = ""
    #: The affected ranks among the present ones; all of them for a finding about the job.
    ranks: tuple[int, ...] = ()


def ok(found: str) -> Finding:
    return Finding(OK, found)


def warn(found: str, means: str, do: str) -> Finding:
    return Finding(WARN, found, means, do)


def fail(found: str, means: str, do: str) -> Finding:
    return Finding(FAIL, found, means, do)


OfRank = Callable[[Facts], Finding]
OfJob = Callable[[Facts], Finding]
#: Checks by name, in report order.
OF_RANK: dict[str, OfRank] = {}
OF_JOB: dict[str, OfJob] = {}


def of_rank(name: str) -> Callable[[OfRank], OfRank]:
    """Registers a check of one rank's facts (see facts.collect) under its name in the report."""

    def register(check: OfRank) -> OfRank:
        OF_RANK[name] = check
        return check

    return register


def of_job(name: str) -> Callable[[OfJob], OfJob]:
    """Registers a check of the whole job: {"size", "missing" ranks, "present": facts by rank, "group", "pairs"}."""

    def register(check: OfJob) -> OfJob:
        OF_JOB[name] = check
        return check

    return register


def evaluate(job: Facts) -> list[Finding]:
    """Returns the findings of all checks of a job's facts. Equal findings of several ranks are merged."""
    present: Mapping[int, Facts] = job["present"]
    findings: list[Finding] = []
    for name, of_one in OF_RANK.items():
        same: dict[Finding, list[int]] = {}
        for rank, facts in present.items():
            same.setdefault(_checked(name, of_one, facts), []).append(rank)
        findings += [replace(finding, ranks=tuple(ranks)) for finding, ranks in same.items()]
    for name, of_all in OF_JOB.items():
        findings.append(replace(_checked(name, of_all, job), ranks=tuple(present)))
    return findings


def _checked(name: str, check: Callable[[Facts], Finding], facts: Facts) -> Finding:
    try:
        finding = check(facts)
    except Exception as error:  # an unexpected fact must not suppress the other checks
        finding = warn(f"the check failed: {type(error).__name__}: {error}", "this check has no result", "report this")
    return replace(finding, name=name)
