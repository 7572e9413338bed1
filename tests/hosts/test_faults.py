"""Failures of a rank, a host or a link: survivors name the rank within a second or by the group's timeout."""

from __future__ import annotations

import pytest

from hosts import netlab, wires

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def named_errors(backend) -> None:
    if backend != "smddp":
        pytest.skip("the errors are smddp's own")


def errors(outcome: netlab.Outcome) -> list[str]:
    """Returns the error of each survivor."""
    found = []
    for rank in outcome.survivors:
        line = next((line for line in outcome.said[rank].splitlines() if line.startswith("error ")), None)
        assert line is not None, f"rank {rank} raised nothing\n{outcome}"
        found.append(line)
    return found


def after_fault(outcome: netlab.Outcome) -> float:
    return max(row["seconds_after_last_fault"] for row in outcome.ranks)


def killed(wire: str, hosts: int, procs: int, fault: str, *arguments: str) -> None:
    """Kills rank 3. Every survivor must name it soon, in at least one of three runs."""
    took = []
    while len(took) < 3 and (not took or took[-1] >= 1.5):
        took.append(killed_once(wire, hosts, procs, fault, *arguments))
    assert took[-1] < 1.5, took


def killed_once(wire: str, hosts: int, procs: int, fault: str, *arguments: str) -> float:
    """Returns the seconds until the survivors have exited."""
    outcome = netlab.run(
        [*netlab.job("steps"), *arguments],
        hosts=hosts,
        procs=procs,
        options=("--fault", fault),
        env=wires.settings(wire),
        seconds=40,
    )
    assert outcome.survivors == [0, 1, 2], outcome
    for error in errors(outcome):
        assert error.startswith("error PeerLostError ranks=[3]"), outcome
        assert f"rank 3 (host h{3 // procs}" in error, outcome
    # Includes the exit of the process.
    return after_fault(outcome)


@pytest.mark.parametrize(
    ("wire", "hosts", "procs"),
    [
        ("tcp", 2, 2),
        pytest.param("tcp", 4, 1, marks=SLOW),
        pytest.param("fabric", 2, 2, marks=SLOW),
        pytest.param("fabric", 4, 1, marks=SLOW),
    ],
)
def test_a_killed_rank_is_named_by_every_survivor_within_a_second(wire, hosts, procs) -> None:
    killed(wire, hosts, procs, "/step 25$/ kill rank=3")


@pytest.mark.parametrize("child", [pytest.param(False, marks=SLOW), True], ids=["", "with a child"])
@pytest.mark.parametrize(
    ("wire", "hosts", "procs"),
    [
        pytest.param("tcp", 2, 2, marks=SLOW),
        pytest.param("tcp", 4, 1, marks=SLOW),
        pytest.param("fabric", 2, 2, marks=SLOW),
        ("fabric", 4, 1),
    ],
)
def test_awaited_rank_that_dies_is_reported(wire, hosts, procs, child) -> None:
    """No message is pending for the rank, and its forked child holds copies of its sockets."""
    arguments = ["--print-after", "25", "--absent", "3", *(["--child"] if child else [])]
    killed(wire, hosts, procs, "/a second later/ kill rank=3", *arguments)


@pytest.mark.parametrize("wire", ["tcp", pytest.param("fabric", marks=SLOW)])
def test_a_host_that_falls_silent_is_lost_within_the_peer_timeout(wire) -> None:
    """A host that loses power sends neither a reset nor an end of connection."""
    outcome = netlab.run(
        [*netlab.job("steps"), "--timeout", "60"],
        hosts=2,
        procs=2,
        options=("--fault", "/step 25$/ poweroff host=1"),
        env={**wires.settings(wire), "SMDDP_PEER_TIMEOUT": "3"},
        seconds=80,
    )
    assert outcome.survivors == [0, 1], outcome
    for error in errors(outcome):
        assert "PeerLostError" in error, outcome
        assert "(host h1" in error and "its host does not respond" in error, outcome
    # A busy machine may be slightly late; the deadline is much longer.
    assert after_fault(outcome) < 6, outcome


@SLOW
@pytest.mark.parametrize("wire", wires.WIRES)
def test_a_stopped_process_ends_a_call_at_its_deadline_only(wire) -> None:
    """The host keeps answering for its stopped rank, longer than the limit for a silent host."""
    outcome = netlab.run(
        [*netlab.job("steps"), "--timeout", "7"],
        hosts=2,
        procs=2,
        options=("--fault", "/step 25$/ stop rank=3", "--fault", "/error/ cont rank=3"),
        env={**wires.settings(wire), "SMDDP_PEER_TIMEOUT": "2"},
        seconds=60,
    )
    for error in errors(outcome):
        assert "CollectiveTimeoutError" in error, outcome


@SLOW
@pytest.mark.parametrize("wire", wires.WIRES)
def test_short_network_outage_has_no_effect(wire) -> None:
    if reason := netlab.why_not("--delay"):
        pytest.skip(reason)
    silence = ("--fault", "/step 25$/ blackhole host=1", "--fault", "/a second later/ restore host=1")
    outcome = netlab.run(
        [*netlab.job("steps"), "--steps", "400", "--print-after", "25"],
        hosts=2,
        procs=2,
        options=("--delay", "20us", *silence),
        env=wires.settings(wire),
        seconds=60,
    )
    assert outcome.status == 0, outcome
