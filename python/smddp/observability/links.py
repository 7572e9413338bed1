"""Slow TCP links between nodes, from the kernel's statistics in the ranks' dumps. Needs neither torch nor the core.

A link is one connection in the direction from a rank to its peer. Its round trip is compared with the group's network
estimate, and its rate with this link's share of the estimate and with the other links of the job. Repeated readings
give moving averages, and the time since when a link is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from smddp.observability import jobs

#: Ratio from which a link is slow.
TIMES = 3.0
# A round trip that is longer by less than this is scheduling noise.
_NOISE_US = 100.0
#: Rates are compared after this many bytes: the kernel's first rates are those of a small congestion window.
FEWEST_BYTES = 16 << 20
# Share of time with a full receive window above which the peer process limits the rate, not the link.
_RECEIVER_LIMITED = 0.1
# Number of links whose median is a reference.
_FEWEST_LINKS = 4
# A dump has at most this many links of a group, so a rank with as many may have more.
_MOST_LINKS = 32
# Slow links in the text for a job.
_MOST_SHOWN = 5
#: Weight of a reading in a moving average.
WEIGHT = 0.3


@dataclass(frozen=True)
class SlowLink:
    """A link that is slower than expected."""

    group: str
    rank: int
    peer: int
    #: hosts of both ranks; the peer's is None if its process is unknown
    host: str
    peer_host: str | None
    #: measured divided by expected time
    times: float
    retransmits: int
    #: measured and expected value
    what: str
    #: identity of the group
    group_id: str = ""
    #: number of successive readings that found it slow, and the time of the first one in seconds since 1970
    readings: int = 1
    since: float | None = None

    def __str__(self) -> str:
        peer_host = f" (host {self.peer_host})" if self.peer_host else ""
        # The first reading contains no time since when a link is slow.
        since = (
            f" since {time.strftime('%H:%M', time.localtime(self.since))}" if self.since and self.readings > 1 else ""
        )
        text = (
            f"link from rank {self.rank} (host {self.host}) to rank {self.peer}{peer_host} of group `{self.group}` is "
            f"{self.times:.1f} times slower{since} than {self.what}"
        )
        segments = f"{self.retransmits} segment{'s'[: self.retransmits != 1]}"
        return f"{text}, {segments} retransmitted" if self.retransmits else text


class _Comparison(NamedTuple):
    """Measured divided by expected time, and whether the difference is above the noise."""

    times: float
    is_certain: bool
    what: str


def slow(processes: Sequence[Mapping[str, Any]]) -> list[SlowLink]:
    """Returns the slow links in the dumps of one job, the slowest first. A connection has at most one entry."""
    hosts = {(jobs.key(group), group["rank"]): one["host"] for one in processes for group in one["groups"]}
    rates = [rate for one in processes for group in one["groups"] for link in _links(group) if (rate := _rate(link))]
    usual = median(rates) if len(rates) >= _FEWEST_LINKS else 0.0
    found = []
    for one in processes:
        for group in one["groups"]:
            for link in _links(group):
                compared = [each for each in _comparisons(group, link, usual, len(rates)) if each.is_certain]
                worst = max(compared, key=lambda each: each.times, default=None)
                if worst is not None and worst.times >= TIMES:
                    peer_host = hosts.get((jobs.key(group), link["peer"]))
                    ranks = (group["name"], group["rank"], link["peer"], one["host"], peer_host)
                    found.append(SlowLink(*ranks, worst.times, link["retransmits"], worst.what, jobs.key(group)))
    return sorted(found, key=lambda one: -one.times)


def ratios(group: Mapping[str, Any]) -> dict[int, float]:
    """Returns measured divided by estimated time of the links of a group's dump, by peer: of its slowest link.

    A ratio above 1 whose difference is noise counts as 1.
    """
    found: dict[int, float] = {}
    for link in _links(group):
        for each in _comparisons(group, link, 0.0, 0):
            times = each.times if each.is_certain else min(each.times, 1.0)
            found[link["peer"]] = max(found.get(link["peer"], 0.0), times)
    return found


def _links(group: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    links: Sequence[Mapping[str, Any]] = group.get("links", ())
    return links


def _rate(link: Mapping[str, Any]) -> float | None:
    """Returns the rate that the path limits, in bytes per second: the newest or the mean one, whichever is greater."""
    newest, mean = link["delivery_bytes_per_s"], link["mean_bytes_per_s"]
    few = link["sent_bytes"] < FEWEST_BYTES or link["receiver_limited"] > _RECEIVER_LIMITED
    return None if few or not newest else float(max(newest, mean or 0))


def _share(group: Mapping[str, Any]) -> float:
    """Returns the rate of a link if all bulk links of the rank and all ranks of its node send, 0 if unknown."""
    links = _links(group)
    sharing = sum(1 for link in links if link["sent_bytes"] >= FEWEST_BYTES)
    if len(links) >= _MOST_LINKS or not sharing:
        return 0.0
    ranks = -(-group["size"] // max(group.get("nodes", 1), 1))
    return float(group["network"]["bytes_per_s"]) / (sharing * max(ranks, 1))


def _comparisons(group: Mapping[str, Any], link: Mapping[str, Any], usual: float, links: int) -> Iterator[_Comparison]:
    """Compares a link with the estimate, and with `usual`, the median rate of `links` links; 0: unknown."""
    network = group.get("network") or {"basis": "default"}
    is_known = network["basis"] in ("measured", "set")
    latency = 2.0 * network["latency_us"] if is_known else 0.0
    shortest = link["min_rtt_us"]
    if latency > 0 and shortest is not None:
        what = f"the estimate: round trip {_time(shortest)}, expected {_time(latency)}"
        yield _Comparison(shortest / latency, shortest - latency >= _NOISE_US, what)
    rate, share = _rate(link), _share(group) if is_known else 0.0
    if rate and max(share, usual) > 0:
        expected, source = (share, "the estimate") if share >= usual else (usual, f"the median of {links} links")
        what = f"{source}: {_gbit(rate)}, expected {_gbit(expected)}"
        yield _Comparison(expected / rate, True, what)


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1000 else f"{microseconds:.0f} us"


def _gbit(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-9:.2g} Gbit/s"


def history(found: Sequence[SlowLink]) -> list[str]:
    """Returns the history lines of a job's slow links."""
    more = [f"history: {len(found) - _MOST_SHOWN} more links are slow (--json lists them)"]
    return [f"history: {one}" for one in found[:_MOST_SHOWN]] + more * (len(found) > _MOST_SHOWN)


class History:
    """Moving averages of the slow links over repeated readings.

    clock: returns the time in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._found: dict[tuple[str, int, int], SlowLink] = {}

    def read(self, jobs: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[SlowLink]]:
        """Returns the slow links of each job with their averages, and since when they are slow.

        jobs: the dumps of the processes of each job. A reading without a link ends its series. Of several connections
        to one rank only the slowest has an average.
        """
        found = [slow(processes) for processes in jobs]
        averaged = iter(self._average([link for of_job in found for link in of_job]))
        return [[*islice(averaged, len(of_job))] for of_job in found]

    def _average(self, found: Sequence[SlowLink]) -> list[SlowLink]:
        now, before, self._found = self._clock(), self._found, {}
        averaged = []
        for link in found:
            key = (link.group_id, link.rank, link.peer)
            new = replace(link, since=now)
            if old := before.get(key):
                times = link.times if key in self._found else old.times + WEIGHT * (link.times - old.times)
                new = replace(link, times=times, since=old.since, readings=old.readings + 1)
            self._found.setdefault(key, new)
            averaged.append(new)
        return averaged
