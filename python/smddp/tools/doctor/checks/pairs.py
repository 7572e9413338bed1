"""What was measured between pairs of ranks: which of them is far slower than its like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smddp.tools.doctor.checks.ranks import named
from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, ok, warn

#: So many times worse than the good ones of its kind, and so many microseconds later, is slow. Within a machine
#: caches and sockets make 3 of it, and a busy processor some microseconds more.
FACTOR = 4.0
_LATER_NEAR = 50.0
_LATER_FAR = 200.0
_FEWEST = 3
_SHOWN = 4

Pair = Mapping[str, Any]


def slow(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs that are far slower than others of their kind (in a node, between nodes), by either measure.

    What is usual is that of the better quarter: a host whose every link is slow must not make it usual.
    """
    found: list[Pair] = []
    for near in (True, False):
        like = [pair for pair in pairs if pair["same node"] == near]
        if len(like) < _FEWEST:
            continue
        quick = sorted(pair["latency us"] for pair in like)[len(like) // 4]
        wide = sorted((pair["GB/s"] for pair in like), reverse=True)[len(like) // 4]
        late = max(FACTOR * quick, quick + (_LATER_NEAR if near else _LATER_FAR))
        found += [pair for pair in like if pair["latency us"] > late or pair["GB/s"] < wide / FACTOR]
    return found


def common(found: Sequence[Pair], pairs: Sequence[Pair]) -> list[int]:
    """The ranks all of whose pairs (two or more) are slow, where other ranks have pairs that are not."""
    ranks = sorted({rank for pair in found for rank in pair["ranks"]})
    slow_pairs = {tuple(pair["ranks"]) for pair in found}
    guilty = []
    for rank in ranks:
        # Within a node and between nodes are different ways.
        kinds = {pair["same node"] for pair in found if rank in pair["ranks"]}
        of_it = [pair for pair in pairs if rank in pair["ranks"] and pair["same node"] in kinds]
        if len(of_it) > 1 and all(tuple(pair["ranks"]) in slow_pairs for pair in of_it):
            guilty.append(rank)
    return [] if len(guilty) == len(ranks) and len(ranks) > 1 else guilty


def _figures(pair: Pair) -> str:
    return f"{pair['latency us']:.3g} us, {pair['GB/s']:.3g} GB/s"


def _usual(pairs: Sequence[Pair]) -> str:
    told = []
    for near, where in ((True, "in a node"), (False, "between nodes")):
        like = [pair for pair in pairs if pair["same node"] == near]
        if like:
            late = sorted(pair["latency us"] for pair in like)
            wide = sorted(pair["GB/s"] for pair in like)
            told.append(
                f"{len(like)} {where}: {late[0]:.3g} to {late[-1]:.3g} us, {wide[0]:.3g} to {wide[-1]:.3g} GB/s"
            )
    return "; ".join(told)


@of_job("pairs")
def pairs(job: Facts) -> Finding:
    measured = job.get("pairs")
    if measured is None:
        return ok("not measured (--quick)" if job.get("quick") else "not measured")
    if measured.get("error"):
        return fail(measured["error"], "messages between ranks fail", "the lines that fail above say why")
    rows = measured["rows"]
    if not rows:
        return warn("none was measured", "there is nobody to measure with", "see `ranks`")
    found = slow(rows)
    if not found:
        return ok(_usual(rows))
    host = {rank: facts["identity"]["host"] for rank, facts in job["came"].items()}
    each = [
        f"{named(pair['ranks'])} ({' - '.join(host[rank] for rank in pair['ranks'])}): {_figures(pair)}"
        for pair in found[:_SHOWN]
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    guilty = common(found, rows)
    of_all = f"; all pairs of {named(guilty)} ({', '.join(sorted({host[r] for r in guilty}))})" if guilty else ""
    rest = [pair for pair in rows if pair not in found]
    return fail(
        f"slow{of_all}: {'; '.join(each)}{more}; the others {_usual(rest)}",
        "every collective waits for its slowest link",
        "measured three times; look at that link's speed and errors (ethtool, ip -s link) and at that host's load, or "
        "leave the host out",
    )
