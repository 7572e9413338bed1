"""A visit in order: facts of all ranks, a group of those who came, measurements, findings. Each step has a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from smddp.observability import info
from smddp.tools.doctor import facts, measure
from smddp.tools.doctor.checks.pairs import slow
from smddp.tools.doctor.launch import Launch
from smddp.tools.doctor.rendezvous import Client, Lost

#: Seconds: for making the group, for all measurements, for the last words.
_GROUP, _MEASURING, _LEAVING = 15.0, 8.0, 3.0
# Beyond what another rank may take, for it to say so.
_SLACK = 5.0
#: For ranks that this process started to end, after the last words.
ENDING = 5.0
_AGAIN = 2
_AGAIN_PAIRS = 8


@dataclass(frozen=True)
class Wishes:
    #: Seconds that ranks may come late.
    wait: float = 20.0
    quick: bool = False


def rank_zero(launch: Launch, wishes: Wishes, client: Client) -> dict[str, Any]:
    """Rank 0's part. Returns the job's facts, for the checks. Raises Lost where its own server is gone."""
    deadline = time.monotonic() + wishes.wait
    client.tell("facts/0", facts.collect(launch.facts()))
    # A rank that looks for as long as this one did comes in time.
    deadline = max(deadline, time.monotonic() + 2.0)
    told = _all(client, "facts", range(launch.size), deadline)
    came = {rank: found for rank, found in told.items() if found is not None}
    client.tell("came", list(came))
    job: dict[str, Any] = {
        "size": launch.size,
        "missing": [rank for rank, found in told.items() if found is None],
        "waited": wishes.wait,
        "quick": wishes.quick,
        "came": came,
        "group": None,
        "pairs": None,
    }
    if len(came) > 1 or launch.size == 1:
        job.update(_together(launch, wishes, client, list(came)))
    client.tell("over", True)
    # The server ends with this process.
    _all(client, "left", [rank for rank in came if rank], time.monotonic() + _LEAVING)
    return job


def other_rank(launch: Launch, wishes: Wishes, client: Client) -> None:
    """The part of all others. Raises Lost where rank 0 is gone or says nothing."""
    client.tell(f"facts/{launch.rank}", facts.collect(launch.facts()))
    came = client.ask("came", wishes.wait + facts.PATIENCE * 2 + _SLACK)
    if came is None:
        raise Lost("rank 0 did not say who came")
    if launch.rank not in came:
        raise Lost(f"rank {launch.rank} came after the others had waited for {wishes.wait:g} s")
    if len(came) > 1:
        _together(launch, wishes, client, came)
    client.ask("over", _GROUP + (1 + _AGAIN) * (_MEASURING + _SLACK))
    client.tell(f"left/{launch.rank}", True)


def _all(client: Client, what: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
    """What those ranks told, by rank; None for those that did not by the deadline, which is one for all."""
    return {rank: client.ask(f"{what}/{rank}", max(deadline - time.monotonic(), 0.0)) for rank in ranks}


def _together(launch: Launch, wishes: Wishes, client: Client, came: list[int]) -> dict[str, Any]:
    """A group of those who came, and this rank's measurements in it: "group" and, on rank 0, "pairs".

    What goes wrong is told as it is.
    """
    me, begun, comm = came.index(launch.rank), time.monotonic(), None
    part: dict[str, Any] = {"error": None}
    try:
        comm = measure.make(client, me, len(came), _GROUP)
        part |= {
            "size": len(came),
            "way": comm.way() if len(came) > 1 else "no wire",
            "seconds": time.monotonic() - begun,
            "nodes": comm.nodes(),
            "network": comm.network(),
            "paths": {name: [small, large] for name, small, large in info.paths(comm)} if me == 0 else {},
        }
    except (RuntimeError, ValueError, KeyError) as error:
        part["error"] = str(error)
    client.tell(f"group/{launch.rank}", {"error": part["error"]})
    if launch.rank == 0:
        told = _all(client, "group", came, time.monotonic() + _GROUP + _SLACK)
        # A group that one rank could not make is nobody's. Each tells of the same cause in its own words.
        errors = [f"rank {rank}: {it['error']}" for rank, it in told.items() if it and it["error"]]
        errors += [f"rank {rank} ended while the group was made" for rank, it in told.items() if it is None]
        part["error"] = next(iter(errors), None)
        client.tell("go", not errors)
    go = comm is not None and client.ask("go", _GROUP + 2 * _SLACK)
    pairs = _measured(launch.rank, client, came, comm) if go and not wishes.quick else None
    if comm is not None:
        comm.close()
    return {"group": part, "pairs": pairs}


def _measured(rank: int, client: Client, came: list[int], comm: Any) -> dict[str, Any]:
    """All pairs once, then those that look slow again: rank 0 says which, until none does.

    Returns {"error", "rows"}: on rank 0 those of all ranks.
    """
    meter = measure.Meter(comm, time.monotonic() + _MEASURING)
    nodes = comm.nodes()
    rows: list[dict[str, Any]] = []
    steps = measure.steps(nodes)
    share = min(1.0, _MEASURING / 2 / (0.1 * max(len(steps), 1)))
    for attempt in range(1 + _AGAIN):
        told: dict[str, Any] = {"error": None, "rows": []}
        try:
            told["rows"] = meter.run(steps, share)
        except RuntimeError as error:
            told["error"] = str(error)
        client.tell(f"measured/{attempt}/{rank}", told)
        if rank == 0:
            parts = _all(client, f"measured/{attempt}", came, time.monotonic() + _MEASURING + _SLACK)
            errors = [f"rank {of}: {it['error']}" for of, it in parts.items() if it and it["error"]]
            errors += [f"rank {of} ended while pairs were measured" for of, it in parts.items() if it is None]
            rows += [row for it in parts.values() if it for row in it["rows"]]
            found = _named(measure.best(rows), came, nodes)
            suspects = [] if errors else slow(found)[:_AGAIN_PAIRS]
            # Attempts are apart in time, and each pair has a step of its own.
            client.tell(f"again/{attempt}", [[came.index(it) for it in pair["ranks"]] for pair in suspects])
            if errors or not suspects:
                return {"error": next(iter(errors), None), "rows": found}
        again = client.ask(f"again/{attempt}", _MEASURING + 2 * _SLACK)
        if not again or told["error"]:
            break
        steps, share = [[(first, second)] for first, second in again], 1.0
    return {"error": None, "rows": _named(measure.best(rows), came, nodes)}


def _named(rows: list[dict[str, Any]], came: list[int], nodes: list[int]) -> list[dict[str, Any]]:
    """By ranks of the job, and whether both are on one node."""
    return [
        {
            **row,
            "ranks": [came[place] for place in row["ranks"]],
            "same node": len({nodes[p] for p in row["ranks"]}) == 1,
        }
        for row in rows
    ]
