"""Groups continue after ranks are killed in calls and others join, with correct results."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import wires
from ranks.group import BACKEND

from faults.manager import Manager

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="another backend reconfigures in its own way")


def _campaign(size: int, kills: int, nodes: int = 1, environment: dict | None = None, seed: int = 0) -> list:
    """Kills one or two of `size` members at random times and replaces them."""
    found = []
    with Manager(size, nodes, environment, seed) as manager:
        while sum(found_ for *_, found_ in found) < kills:
            time.sleep(manager.random.uniform(0.0, 0.03))
            living = manager.members()
            many = 2 if len(living) > 3 and manager.random.random() < 0.2 else 1
            kill = manager.kill(manager.random.sample(living, many))
            found.append((kill, many))
            while len(manager.members()) < size:
                manager.begin_member()
            # While they start, the others make calls.
            manager.settle(shuffle=True)
    return [kill for kill, _ in found]


def _joins(size: int, joins: int) -> list[float]:
    """A new rank joins `size` - 1 busy ranks, then one rank is killed; repeated."""
    found = []
    with Manager(size, seed=size) as manager:
        while len(found) < joins:
            manager.kill(manager.random.sample(manager.members(), 1))
            manager.begin_member()
            # While it starts, the others make calls.
            found.append(manager.settle(shuffle=True))
    return found


def _summary(kills: list) -> str:
    seconds = [kill.seconds for kill in kills]
    return f"{len(seconds)} times killed; from a death to right results in all survivors, {_spread(seconds)}"


def _spread(seconds: list[float]) -> str:
    seconds = sorted(seconds)
    at = lambda share: seconds[min(len(seconds) - 1, int(share * len(seconds)))]  # noqa: E731
    middle, most = statistics.median(seconds), seconds[-1]
    return f"ms: median {1e3 * middle:.1f}, p90 {1e3 * at(0.9):.1f}, p99 {1e3 * at(0.99):.1f}, most {1e3 * most:.1f}"


@pytest.mark.parametrize("wire", ["shm", "tcp", "efa"])
def test_survivors_go_on_and_newcomers_join(wire):
    settings = wires.settings(wire)
    kills = _campaign(4, 6, nodes=1 if wire == "shm" else 2, environment=settings)
    print(_summary(kills))


def test_the_example_of_ddp_has_the_losses_of_one_process_though_ranks_die_and_join():
    example = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and " 3 configurations" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_elastic_ddp_example_resumes_from_its_file_under_torchrun():
    example = Path(__file__).parents[2] / "examples" / "elastic_ddp.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*launch, "--max-restarts", "1", str(example)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and " 1 restarts" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("wire", wires.WAYS)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_thousand_kills(wire, size):
    settings = wires.settings(wire)
    kills = _campaign(size, 100, nodes=1 if wire == "shm" else 2, environment=settings, seed=size)
    print(f"{wire}, {size} ranks: {_summary(kills)}")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("size", [4, 8])
def test_a_late_rank_joins_two_hundred_times_under_load(size):
    joins = _joins(size, 200)
    print(f"{len(joins)} joins to {size} ranks; from the new configuration to correct results on all, {_spread(joins)}")
