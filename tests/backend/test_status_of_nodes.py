"""`smddp status` from each node of a job: it names the rank that all others wait for.

Four ranks are four nodes of one machine. A query from one node sees the processes of that node only, so the state of
the others comes through the sidebands of their group.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks.launching import clean, free_port, torchrun
from smddp.observability import status

JOB = Path(__file__).with_name("status_job.py")
RANKS, LATE = 4, 3
#: Time limits of all tests of one job, and of the job itself, whose calls must not expire during the tests.
SECONDS, JOB_SECONDS = 180.0, 300.0


class Ranks(list[int]):
    """The process ids of the ranks, and the time at which their tests must have ended."""

    end: float

    def until(self, condition: Callable[[], Any]) -> Any:
        while not (found := condition()):
            assert time.monotonic() < self.end, "the job is not in the expected state"
            time.sleep(0.02)
        return found


@pytest.fixture(scope="module", params=["0", "1"], ids=["plain", "encrypted"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder, port = tmp_path_factory.mktemp("job"), free_port()
    settings = {"SMDDP_NODE": "node%r", "SMDDP_ENCRYPT": request.param, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(folder), str(JOB_SECONDS)],
            env={**clean(), **settings, **torchrun(rank, RANKS, port)},
        )
        for rank in range(RANKS)
    ]
    try:
        files = [folder / f"pid{rank}" for rank in range(RANKS)]
        found = Ranks(rank.pid for rank in ranks)
        found.end = time.monotonic() + SECONDS
        found.until(lambda: all(path.exists() and path.read_text() for path in files))
        yield found
        (folder / "go").touch()
        assert [rank.wait(SECONDS) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture
def seen_from(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `smddp status` with the processes of one node. Returns its exit status and its output."""
    sockets = status._sockets

    def query(pids: list[int], **options: Any) -> tuple[int, str]:
        monkeypatch.setattr(status, "_sockets", lambda: [one for one in sockets() if one[0] in pids])
        ended = status.main(status.Options(threshold=0.5, **options))
        return ended, capsys.readouterr().out

    return query


@pytest.mark.parametrize("node", range(RANKS))
def test_late_rank_is_named_from_each_node(node: int, job: Ranks, seen_from: Callable[..., tuple[int, str]]):
    def waits() -> str:
        ended, text = seen_from([job[node]])
        call = re.match(r"all_reduce #\d+ ", text)
        # The verdict, and the rows of all ranks but one.
        return text if ended == 3 and call and text.count(call[0]) == RANKS else ""

    text = job.until(waits)
    name = f"rank {LATE} (host {os.uname().nodename}, pid {job[LATE]}), which is in read_batch at {JOB}:"
    head = text.splitlines()[0]
    assert " of group `world` has waited " in head and f" s for {name}" in head, text
    assert all(f"{pid}" in text for pid in job), text


def test_json_has_all_ranks_and_the_verdict(job: Ranks, seen_from: Callable[..., tuple[int, str]]):
    found = json.loads(job.until(lambda: (result := seen_from([job[0]], as_json=True))[0] == 3 and result[1]))
    assert sorted(one["pid"] for one in found["processes"]) == sorted(job)
    (one,) = found["jobs"]
    assert one["waits_long"] and not one["silent"] and f"pid {job[LATE]}" in one["verdict"][0]


def test_json_has_the_links_of_all_nodes(job: Ranks, seen_from: Callable[..., tuple[int, str]]):
    found = json.loads(job.until(lambda: (result := seen_from([job[0]], as_json=True))[0] == 3 and result[1]))
    joined = set()
    for one in found["processes"]:
        (world,) = (group for group in one["groups"] if group["name"] == "world")
        assert world["network"]["latency_us"] > 0, world
        for link in world["links"]:
            assert link["min_rtt_us"] is not None and link["sent_bytes"] + link["received_bytes"] > 100, link
            joined.add(frozenset((world["rank"], link["peer"])))
    # Each rank has a connection, and each connection has two ranks.
    assert set().union(*joined) == set(range(RANKS)) and all(len(pair) == 2 for pair in joined), joined
    assert "slow_links" in found["jobs"][0]


def test_one_host_alone_does_not_query_the_others(job: Ranks, seen_from: Callable[..., tuple[int, str]]):
    _, text = job.until(lambda: (result := seen_from([job[0], job[1]], host_only=True))[0] == 3 and result)
    assert "the state of 2 of its 4 ranks is unknown" in text.splitlines()[0], text
    assert not any(f"{pid}" in text for pid in job[2:]), text


def test_stopped_rank_of_another_node_is_silent(job: Ranks, seen_from: Callable[..., tuple[int, str]]):
    os.kill(job[1], signal.SIGSTOP)
    try:
        # The other ranks may get no processor time for a while, and are silent then, too.
        name = f"rank 1 (host {os.uname().nodename}, pid {job[1]})"
        reason = "no reply within 2 s: it is stopped, or gets no processor time"
        silent = f"{name}, which does not answer: {reason}; rank 3"
        job.until(lambda: (result := seen_from([job[0]]))[0] == 3 and silent in result[1])
        stopped = f"{name}, which is stopped (by a signal or a debugger); rank 3"
        job.until(lambda: (result := seen_from([job[0], job[1]]))[0] == 3 and stopped in result[1])
    finally:
        os.kill(job[1], signal.SIGCONT)
