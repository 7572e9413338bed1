"""Reliability of straggler reports: DDP training with and without a late rank, on an idle and a busy machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("late_rounds.py")
# Half of each job's rounds have a late rank: twenty in all jobs.
JOBS, ROUNDS = 5, 8


def busy(parent: int) -> None:
    # Ends with its parent: a killed test cannot stop it.
    while os.getppid() == parent:
        pass


@pytest.fixture(params=["quiet", "busy"])
def machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test on the idle machine, or beside one busy process more than there are processors."""
    count = (os.cpu_count() or 1) + 1 if request.param == "busy" else 0
    context, me = multiprocessing.get_context("spawn"), (os.getpid(),)
    hogs = [context.Process(target=busy, args=me, daemon=True) for _ in range(count)]
    for hog in hogs:
        hog.start()
    yield request.param
    for hog in hogs:
        hog.kill()
        hog.join()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(JOBS))
def test_each_late_rank_is_named_within_fifty_steps_without_false_alarms(machine: str, seed: int, tmp_path: Path):
    job = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path), str(ROUNDS), str(seed)],
        env={**os.environ, "SMDDP_STRAGGLERS": "1"},
        capture_output=True,
        text=True,
        timeout=260,
    )
    assert job.returncode == 0, job.stderr
    found = [json.loads(line) for line in job.stdout.splitlines()]
    late = [one for one in found if one["late"] is not None]
    even = [one for one in found if one["late"] is None]
    assert len(late) == len(even) == ROUNDS // 2
    missed = [one for one in late if one["named"] != [one["late"]] or one["steps"] >= 50]
    false = [one for one in even if one["named"] or one["status"]]
    assert not missed and not false, (missed, false)
    print(f"{machine}: named after {sorted(one['steps'] for one in late)} steps")
