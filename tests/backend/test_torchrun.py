"""torchrun names the rank that failed first, not the ranks with consequential errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.group import BACKEND

# For one generation of ranks on a loaded machine.
SECONDS = 240

# Rank 1 fails in every generation; torchrun restarts all ranks up to --max-restarts times.
SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def fail(how):
    if how == "raise":
        raise ValueError("the first cause")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

def main(backend, how, when):
    dist.init_process_group(backend)
    for step in range(6):
        if dist.get_rank() == 1 and step == int(when):
            fail(how)
        dist.all_reduce(torch.ones(8))
    # Not reached by the other ranks; none hangs.
    print("went on")

if __name__ == "__main__":
    (record(main) if sys.argv[4] == "recorded" else main)(*sys.argv[1:4])
"""


def blamed(tmp_path: Path, ranks: int, how: str, when: int, recorded: bool, restarts: int) -> tuple[list[int], str]:
    """Returns the rank that torchrun blames in each generation, and torchrun's output."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", str(script), BACKEND, how, str(when), "recorded" if recorded else "plain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as torchrun:
        try:
            said, _ = torchrun.communicate(timeout=SECONDS * (restarts + 1))
        finally:
            # On SIGTERM it ends its workers, which are in other sessions.
            torchrun.terminate()
    assert torchrun.returncode != 0 and "went on" not in said, said
    causes = [int(rank) for rank in re.findall(r"failed \(exitcode: -?\d+\) local_rank: (\d+)", said)]
    root = re.search(r"Root Cause \(first observed failure\):\n\[\d+\]:\n.*\n.*\n\s+rank\s+: (\d+)", said)
    assert root is not None and int(root[1]) == causes[-1], said
    return causes, said


# The slow test below has more cases, five times each.
WAYS = [
    pytest.param(2, "raise", 3, True, id="2-raises-between-collectives"),
    pytest.param(2, "exit", 3, False, id="2-exits-without-record"),
]


@pytest.mark.parametrize(("ranks", "how", "when", "recorded"), WAYS)
def test_torchrun_blames_the_rank_that_failed_first(tmp_path, ranks, how, when, recorded) -> None:
    causes, said = blamed(tmp_path, ranks, how, when, recorded, restarts=0)
    assert causes == [1], said
    if how == "raise":
        cause = r"the program of pid \d+: ValueError: the first cause, at script\.py:\d+ in fail"
        assert re.search(f"its last recorded error, .* s before this one: {cause}", said), said


@pytest.mark.slow
@pytest.mark.timeout(6 * SECONDS, func_only=True)
@pytest.mark.parametrize("when", [0, 3], ids=["before", "between"])
@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_blames_the_rank_that_failed_first_five_times_in_five(tmp_path, ranks, how, when) -> None:
    causes, said = blamed(tmp_path, ranks, how, when, recorded=True, restarts=4)
    assert causes == [1] * 5, said
