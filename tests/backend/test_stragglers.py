"""A repeatedly late rank, and no other, is named by the log, by `smddp status` and by a trace."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smddp.observability import stragglers, trace
from smddp.observability.stragglers import Stragglers

JOB = Path(__file__).with_name("late_job.py")


def test_a_rank_that_is_late_in_the_backward_pass_is_named_within_fifty_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    environment = {**os.environ, "SMDDP_STRAGGLERS": "1", "SMDDP_METRICS_INTERVAL": "1"}
    job = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert job.returncode == 0, job.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["without"] == [] and found["first"], found
    assert found["steps"] < 50, found
    assert job.stderr.count("was last in") == 1 and "SMDDP WARN rank 2 was last in" in job.stderr, job.stderr
    assert [line.partition(" was")[0] for line in found["status"]] == ["rank 2"], found
    assert trace.main([str(tmp_path / f"dump-{rank}.json") for rank in range(3)], str(tmp_path / "trace.json")) == 0
    assert "rank 2 was last in" in capsys.readouterr().out


def dumps(late: Any, ranks: int = 4, operations: int = 200, size: int = 4, hosts: int = 1) -> list[dict[str, Any]]:
    """Returns dumps of operations of 1 ms, one every 50 ms, which a rank starts late(seq, rank) ms late.

    Each host's clock is 3 s ahead of the previous one.
    """
    found = []
    for rank in range(ranks):
        host = rank * hosts // ranks
        ops = []
        for seq in range(operations):
            begin = 50 * seq + 3000 * host
            end = begin + max(late(seq, other) for other in range(size)) + 1
            times = {"submitted_ns": int((begin + late(seq, rank)) * 1e6), "ended_ns": int(end * 1e6)}
            ops.append({"seq": seq, "what": f"all_reduce #{seq}", "outcome": "ok", **times})
        group = {"name": "0", "rank": rank, "size": size, "operations": ops}
        found.append({"host": f"host{host}", "rank": rank, "groups": [group]})
    return found


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_late_rank_is_named_for_any_offset_of_the_hosts_clocks(hosts: int):
    (one,) = stragglers.find(dumps(lambda seq, rank: 14 if rank == 1 and seq % 10 else 0, hosts=hosts))
    assert str(one) == "rank 1 was last in 90% of the last 200 operations of group `0`, median 14 ms late"


def by_chance(seq: int, rank: int) -> float:
    return random.Random(seq).sample(range(40), 4)[rank]


@pytest.mark.parametrize(
    "late",
    [
        lambda seq, rank: 0,
        lambda seq, rank: 8 if rank == 2 else 0,  # less than the usual jitter
        lambda seq, rank: 20 if rank == seq % 4 else 0,
        lambda seq, rank: 20 if rank >= 2 else 0,  # half of the ranks: no single straggler
        lambda seq, rank: 20 if rank == 2 and seq < 15 else 0,  # too rarely
        by_chance,
    ],
)
def test_other_delays_name_no_rank(late: Any):
    assert stragglers.find(dumps(late)) == []


def test_a_rank_that_is_late_because_of_another_is_not_named():
    def late(seq: int, rank: int) -> float:
        return {3: 45, 1: 10}.get(rank, 0)

    assert [one.rank for one in stragglers.find(dumps(late))] == [3]
    assert stragglers.find(dumps(late, ranks=3)) == []


def test_two_jobs_with_the_same_group_name_are_not_compared():
    late = dumps(lambda seq, rank: 20 if rank == 1 else 0)
    assert stragglers.find(late) and not stragglers.find(late + late[:1])


def test_repeated_updates_count_operations_once_and_ignore_an_older_group():
    def late(seq: int, rank: int) -> float:
        return 20 if rank == 1 else 0

    watch = Stragglers()
    for _ in range(3):
        (one,) = watch.update(dumps(late))
    assert one.operations == 200
    assert watch.update(dumps(late, operations=10)) == []
