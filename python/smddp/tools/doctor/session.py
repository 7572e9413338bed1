"""Steps of a doctor run: facts of all ranks, a group of the present ranks, measurements. Each step has a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from smddp._native import core
from smddp.observability import info
from smddp.tools.doctor import facts, measure
from smddp.tools.doctor.checks.pairs import slow
from smddp.tools.doctor.launch import Launch
from smddp.tools.doctor.rendezvous import Client, ConnectionLost

#: Seconds: for making the group, for all measurements, for the final messages.
_GROUP, _MEASURING, _LEAVING = 15.0, 8.0, 3.0
# Extra seconds for another rank to report its own timeout.
_SLACK = 5.0
#: Seconds for started ranks to exit after the final messages.
ENDING = 5.0
_AGAIN = 2
_AGAIN_PAIRS = 8


@dataclass(frozen=True)
class Options:
    #: Seconds to wait for late ranks.
    wait: float = 20.0
    quick: bool = False
    #: Receives the current step of rank 0.
    step: Callable[[str], None] = lambda text: None


def rank_zero(launch: Launch, options: Options, client: Client) -> dict[str, Any]:
    """Runs rank 0. Returns the job's facts for the checks. Raises ConnectionLost if its server fails."""
    deadline = time.monotonic() + options.wait
    options.step("collecting facts")
    client.publish("facts/0", facts.collect(launch.facts()))
    # Another rank may need as long as this one to collect its facts.
    deadline = max(deadline, time.monotonic() + 2.0)
    options.step(f"waiting for the facts of {launch.size} ranks, at most {options.wait:g} s")
    collected = _all(client, "facts", range(launch.size), deadline)
    present = {rank: found for rank, found in collected.items() if found is not None}
    client.publish("present", list(present))
    job: dict[str, Any] = {
        "size": launch.size,
        "missing": [rank for rank, found in collected.items() if found is None],
        "waited": options.wait,
        "quick": options.quick,
        "present": present,
        "group": None,
        "pairs": None,
        "links": None,
    }
    if len(present) > 1 or launch.size == 1:
        job.update(_together(launch, options, client, list(present)))
    client.publish("over", True)
    # The server ends with this process.
    _all(client, "left", [rank for rank in present if rank], time.monotonic() + _LEAVING)
    return job


def other_rank(launch: Launch, options: Options, client: Client) -> None:
    """Runs another rank. Raises ConnectionLost if rank 0 closes the connection or does not answer."""
    client.publish(f"facts/{launch.rank}", facts.collect(launch.facts()))
    present = client.ask("present", options.wait + facts.PATIENCE * 2 + _SLACK)
    if present is None:
        raise ConnectionLost("rank 0 did not publish the present ranks")
    if launch.rank not in present:
        raise ConnectionLost(f"rank {launch.rank} started after the others had waited for {options.wait:g} s")
    if len(present) > 1:
        _together(launch, options, client, present)
    client.ask("over", _GROUP + (1 + _AGAIN) * (_MEASURING + _SLACK))
    client.publish(f"left/{launch.rank}", True)


def _all(client: Client, what: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
    """Returns the values of these ranks, None for a rank without one by the common deadline."""
    return {rank: client.ask(f"{what}/{rank}", max(deadline - time.monotonic(), 0.0)) for rank in ranks}


def _together(launch: Launch, options: Options, client: Client, present: list[int]) -> dict[str, Any]:
    """Creates a group of the present ranks and measures in it. Returns "group" and, on rank 0, "pairs" and "links".

    Errors are part of the result.
    """
    me, begun, comm = present.index(launch.rank), time.monotonic(), None
    part: dict[str, Any] = {"error": None}
    options.step(f"creating a group of {len(present)} ranks")
    try:
        comm = measure.make(client, me, len(present), _GROUP)
        part |= {
            "size": len(present),
            "way": comm.transports() if len(present) > 1 else "no wire",
            "seconds": time.monotonic() - begun,
            "nodes": comm.nodes(),
            "network": comm.network(),
            "paths": {name: [small, large] for name, small, large in info.paths(comm)} if me == 0 else {},
        }
    except (RuntimeError, ValueError, KeyError) as error:
        part["error"] = str(error)
    client.publish(f"group/{launch.rank}", {"error": part["error"]})
    if launch.rank == 0:
        replies = _all(client, "group", present, time.monotonic() + _GROUP + _SLACK)
        # An error on one rank fails the group. All ranks report the same cause, so the first error is enough.
        errors = [f"rank {rank}: {it['error']}" for rank, it in replies.items() if it and it["error"]]
        errors += [f"rank {rank} ended while the group was made" for rank, it in replies.items() if it is None]
        part["error"] = next(iter(errors), None)
        client.publish("go", not errors)
    go = comm is not None and client.ask("go", _GROUP + 2 * _SLACK)
    options.step(f"measuring the pairs of {len(present)} ranks, at most {_MEASURING * (1 + _AGAIN):g} s")
    pairs = _measured(launch.rank, client, present, comm) if go and not options.quick else None
    links = _links(launch.rank, client, present) if go else None
    if comm is not None:
        comm.close()
    return {"group": part, "pairs": pairs, "links": links}


#: Values of a group's dump for the check of the links.
_LINK_VALUES = ("name", "id", "size", "nodes", "network")


def _links(rank: int, client: Client, present: list[int]) -> list[dict[str, Any]]:
    """Returns, on rank 0, the TCP connections of all ranks, with the ranks of the job.

    No rank closes the group before all have read their connections.
    """
    dump = json.loads(core().dump())
    groups = [
        {
            **{name: group[name] for name in _LINK_VALUES},
            "rank": present[group["rank"]],
            "links": [{**link, "peer": present[link["peer"]]} for link in group["links"]],
        }
        for group in dump["groups"]
        if group["name"] == measure.GROUP
    ]
    client.publish(f"links/{rank}", {"host": dump["host"], "groups": groups})
    if rank > 0:
        client.ask("read", _LEAVING + _SLACK)
        return []
    replies = _all(client, "links", present, time.monotonic() + _LEAVING)
    client.publish("read", True)
    return [found for found in replies.values() if found is not None]


def _measured(rank: int, client: Client, present: list[int], comm: Any) -> dict[str, Any]:
    """Measures all pairs, then repeats the slow ones that rank 0 selects.

    Returns {"error", "rows"}; rank 0 has the rows of all ranks.
    """
    meter = measure.Meter(comm, time.monotonic() + _MEASURING)
    nodes = comm.nodes()
    rows: list[dict[str, Any]] = []
    steps = measure.steps(nodes)
    share = min(1.0, _MEASURING / 2 / (0.1 * max(len(steps), 1)))
    for attempt in range(1 + _AGAIN):
        result: dict[str, Any] = {"error": None, "rows": []}
        try:
            result["rows"] = meter.run(steps, share)
        except RuntimeError as error:
            result["error"] = str(error)
        client.publish(f"measured/{attempt}/{rank}", result)
        if rank == 0:
            parts = _all(client, f"measured/{attempt}", present, time.monotonic() + _MEASURING + _SLACK)
            errors = [f"rank {of}: {it['error']}" for of, it in parts.items() if it and it["error"]]
            errors += [f"rank {of} ended while pairs were measured" for of, it in parts.items() if it is None]
            rows += [row for it in parts.values() if it for row in it["rows"]]
            found = _named(measure.best(rows), present, nodes)
            suspects = [] if errors else slow(found)[:_AGAIN_PAIRS]
            # The repeated pairs run one at a time.
            client.publish(f"again/{attempt}", [[present.index(it) for it in pair["ranks"]] for pair in suspects])
            if errors or not suspects:
                return {"error": next(iter(errors), None), "rows": found}
        again = client.ask(f"again/{attempt}", _MEASURING + 2 * _SLACK)
        if not again or result["error"]:
            break
        steps, share = [[(first, second)] for first, second in again], 1.0
    return {"error": None, "rows": _named(measure.best(rows), present, nodes)}


def _named(rows: list[dict[str, Any]], present: list[int], nodes: list[int]) -> list[dict[str, Any]]:
    """Converts group ranks to ranks of the job, and adds "same node"."""
    return [
        {
            **row,
            "ranks": [present[place] for place in row["ranks"]],
            "same node": len({nodes[p] for p in row["ranks"]}) == 1,
        }
        for row in rows
    ]
