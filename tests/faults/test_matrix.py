"""Every fault of a rank in every call is reported to all other ranks in time, without wrong results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks.group import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="another backend has its own promises")


def _matrix(*arguments: str, limit: int) -> None:
    # Ranks are forked from a process without threads of smddp.
    command = [sys.executable, "-m", "faults.matrix", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=limit)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_death_is_known_within_a_second():
    _matrix("--ways", "shm,tcp", "--sizes", "4", "--faults", "kill", "--calls", "all_reduce,ring,broadcast", limit=60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_fault_in_every_call():
    _matrix(limit=3500)
