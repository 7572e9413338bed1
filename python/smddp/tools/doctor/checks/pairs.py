"""Check for pairs of ranks that are much slower than other pairs of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from smddp.text import named_ranks
from smddp.tools.doctor.finding import Facts, Finding, fail, of_job, ok, warn

#: A slow pair is this many times worse than the better quarter, and slower by a minimum in microseconds. Within a
#: machine caches and NUMA nodes cause a factor of 3, and a busy processor some microseconds.
FACTOR = 4.0
_LATER_SAME_NODE = 50.0
_LATER_OTHER_NODE = 200.0
_FEWEST = 3
_SHOWN = 4

Pair = Mapping[str, Any]


def slow(pairs: Sequence[Pair]) -> list[Pair]:
    """Returns the pairs much slower than others of their kind (within or between nodes), in latency or bandwidth.

    The better quarter is the reference, so that a host with only slow links does not define it.
    """
    found: list[Pair] = []
    for same_node in (True, False):
        like = [pair for pair in pairs if pair["same node"] == same_node]
        if len(like) < _FEWEST:
            continue
        quick = sorted(pair["latency us"] for pair in like)[len(like) // 4]
        wide = sorted((pair["GB/s"] for pair in like), reverse=True)[len(like) // 4]
        late = max(FACTOR * quick, quick + (_LATER_SAME_NODE if same_node else _LATER_OTHER_NODE))
        found += [pair for pair in like if pair["latency us"] > late or pair["GB/s"] < wide / FACTOR]
    return found


def common(found: Sequence[Pair], pairs: Sequence[Pair]) -> list[int]:
    """Returns ranks whose pairs (two or more) are all slow, if other ranks have pairs that are not."""
    ranks = sorted({rank for pair in found for rank in pair["ranks"]})
    slow_pairs = {tuple(pair["ranks"]) for pair in found}
    late_ranks = []
    for rank in ranks:
        # Pairs within a node and between nodes use different paths.
        kinds = {pair["same node"] for pair in found if rank in pair["ranks"]}
        of_it = [pair for pair in pairs if rank in pair["ranks"] and pair["same node"] in kinds]
        if len(of_it) > 1 and all(tuple(pair["ranks"]) in slow_pairs for pair in of_it):
            late_ranks.append(rank)
    return [] if len(late_ranks) == len(ranks) and len(ranks) > 1 else late_ranks


def _figures(pair: Pair) -> str:
    return f"{pair['latency us']:.3g} us, {pair['GB/s']:.3g} GB/s"


def _usual(pairs: Sequence[Pair]) -> str:
    parts = []
    for same_node, where in ((True, "in a node"), (False, "between nodes")):
        like = [pair for pair in pairs if pair["same node"] == same_node]
        if like:
            late = sorted(pair["latency us"] for pair in like)
            wide = sorted(pair["GB/s"] for pair in like)
            parts.append(
                f"{len(like)} {where}: {late[0]:.3g} to {late[-1]:.3g} us, {wide[0]:.3g} to {wide[-1]:.3g} GB/s"
            )
    return "; ".join(parts)


@of_job("pairs")
def pairs(job: Facts) -> Finding:
    measured = job.get("pairs")
    if measured is None:
        return ok("not measured (--quick)" if job.get("quick") else "not measured")
    if measured.get("error"):
        return fail(measured["error"], "messages between ranks fail", "see the failures above")
    rows = measured["rows"]
    if not rows:
        return warn("not measured", "no other rank is present", "see `ranks`")
    found = slow(rows)
    if not found:
        return ok(_usual(rows))
    host = {rank: facts["identity"]["host"] for rank, facts in job["present"].items()}
    each = [
        f"{named_ranks(pair['ranks'])} ({' - '.join(host[rank] for rank in pair['ranks'])}): {_figures(pair)}"
        for pair in found[:_SHOWN]
    ]
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    late_ranks = common(found, rows)
    where = sorted({host[rank] for rank in late_ranks})
    of_all = f"; all pairs of {named_ranks(late_ranks)} ({', '.join(where)})" if late_ranks else ""
    rest = [pair for pair in rows if pair not in found]
    return fail(
        f"slow{of_all}: {'; '.join(each)}{more}; the others {_usual(rest)}",
        "every collective waits for its slowest link",
        "measured three times; check the link's speed and errors (ethtool, ip -s link) and the host's load, or "
        "leave the host out",
    )
