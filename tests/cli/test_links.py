"""Slow TCP links in `smddp status`: the round trip and the rate of a link against the estimate and other links."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from cli.test_status_jobs import world
from smddp.observability import dumps, links, status

GBIT = 125_000_000


def link(peer: int, **values: Any) -> dict[str, Any]:
    """Returns a link of 10 Gbit/s and 100 us."""
    usual = {
        "peer": peer,
        "rtt_us": 120,
        "min_rtt_us": 100,
        "delivery_bytes_per_s": 10 * GBIT,
        "mean_bytes_per_s": 10 * GBIT,
        "receiver_limited": 0.0,
        "sent_bytes": 1 << 30,
        "received_bytes": 1 << 30,
        "retransmits": 0,
    }
    return {**usual, **values}


def rank(number: int, *found: dict[str, Any], basis: str = "measured") -> dict[str, Any]:
    """Returns the dump of one of four ranks on two hosts, with an estimate of 50 us and 10 Gbit/s a node."""
    one = world(number, "ab"[number // 2])
    network = {"latency_us": 50.0, "bytes_per_s": 10.0 * GBIT, "basis": basis}
    one["groups"][0].update(nodes=2, network=network, links=list(found))
    return one


SLOW = {"delivery_bytes_per_s": 1 * GBIT, "mean_bytes_per_s": GBIT}


def texts(*processes: dict[str, Any]) -> list[str]:
    for one in processes:
        dumps.check(one, dumps._PROCESS)
    return [str(one) for one in links.slow(processes)]


def test_links_as_estimated_are_not_reported():
    assert texts(rank(0, link(2)), rank(1, link(3)), rank(2, link(0)), rank(3, link(1))) == []


def test_long_round_trip_is_reported_with_both_ranks_and_hosts():
    text = "link from rank 0 (host a) to rank 2 (host b) of group `world` is 4.0 times slower than the estimate: "
    expected = text + "round trip 400 us, expected 100 us, 1 segment retransmitted"
    assert texts(rank(0, link(2, min_rtt_us=400, retransmits=1)), rank(2, link(0))) == [expected]
    # A queue on the path is not a slow link.
    assert texts(rank(0, link(2, rtt_us=9000))) == []


def test_low_rate_is_compared_with_the_share_of_the_estimate():
    """Two ranks of a node with one link each share 10 Gbit/s; with two links each, a quarter is expected."""
    (text,) = texts(rank(0, link(2, **SLOW)))
    assert "5.0 times slower than the estimate: 1 Gbit/s, expected 5 Gbit/s" in text
    assert texts(rank(0, link(2, **SLOW), link(3, **SLOW))) == []


@pytest.mark.parametrize(
    "values",
    [
        {"delivery_bytes_per_s": None},
        {"sent_bytes": 1 << 20},
        {"receiver_limited": 0.5},
        {"mean_bytes_per_s": 4 * GBIT},
    ],
    ids=["program sends too little", "few bytes", "receiver is slow", "mean rate is high"],
)
def test_rate_that_the_link_does_not_limit_is_not_reported(values: dict[str, Any]):
    assert texts(rank(0, link(2, **{**SLOW, **values}))) == []


def test_links_are_compared_with_their_median_without_a_measured_estimate():
    slow = link(2, min_rtt_us=5000, **SLOW)
    assert texts(rank(0, slow, basis="default")) == []
    others = [rank(number, link(0), link(1), basis="default") for number in (2, 3)]
    (text,) = texts(rank(0, slow, basis="default"), *others)
    assert "10.0 times slower than the median of 5 links: 1 Gbit/s, expected 10 Gbit/s" in text


def test_values_of_other_processes_cannot_break_the_comparison():
    odd = link(2, min_rtt_us=-1, delivery_bytes_per_s=-1, mean_bytes_per_s=0, receiver_limited=-5.0)
    one = rank(0, odd, link(99, **SLOW))
    one["groups"][0].update(size=-3, nodes=-1, network={"latency_us": -1, "bytes_per_s": -5.0, "basis": "set"})
    assert texts(one) == [] and links.ratios(one["groups"][0]) == {}
    old = world(0)
    assert links.slow([old]) == [] and links.ratios(old["groups"][0]) == {}
    with pytest.raises(ValueError, match="rtt_us"):
        texts(rank(0, link(2, rtt_us="x\x1b")))


def test_status_shows_the_five_slowest_links_as_history():
    many = [link(2, min_rtt_us=1000 * (number + 1)) for number in range(7)]
    history = [line for line in status.lines([rank(0, *many)], {}) if line.startswith("history: ")]
    assert len(history) == 6 and "round trip 7.0 ms" in history[0], history
    assert history[-1] == "history: 2 more links are slow (--json lists them)"


def test_ratio_of_a_peer_is_that_of_its_slowest_link():
    one = rank(
        0, link(2), link(2, min_rtt_us=300), link(3, min_rtt_us=10, **SLOW), link(1, min_rtt_us=199), basis="set"
    )
    # Each of the four links has an eighth of 10 Gbit/s. A difference of 99 us is noise.
    assert links.ratios(one["groups"][0]) == {2: 3.0, 3: pytest.approx(10 / 8), 1: 1.0}


def test_repeated_readings_give_the_average_and_the_time_since_when_a_link_is_slow():
    """One reading has no such time, and a fast reading ends the series."""
    noon = time.mktime((2026, 11, 25, 12, 4, 0, 0, 0, -1))
    clock = count(noon, 60.0)
    history = links.History(lambda: next(clock))

    def read(round_trip: int) -> list[str]:
        return [str(one) for one in history.read([[rank(0, link(2, min_rtt_us=round_trip))]])[0]]

    (first,), (second,) = read(400), read(500)
    assert "is 4.0 times slower than the estimate" in first
    assert "is 4.3 times slower since 12:04 than the estimate: round trip 500 us" in second
    assert read(100) == []
    assert "is 4.0 times slower than the estimate" in read(400)[0] and " since 12:07 " in read(400)[0]


def test_history_keeps_the_links_of_jobs_apart():
    """Two jobs have groups of equal names; only their identities differ."""
    history = links.History()
    other = rank(0, link(2, min_rtt_us=400))
    other["groups"][0]["id"] = "other"
    jobs_read = [[rank(0)], [other], [rank(0, link(2, min_rtt_us=900), link(2, min_rtt_us=400))]]
    assert [len(found) for found in history.read(jobs_read)] == [0, 1, 2]
    again = history.read(jobs_read)
    assert [[(one.times, one.readings) for one in found] for found in again] == [[], [(4.0, 2)], [(9.0, 2), (4.0, 2)]]
