"""Open MPI's mpirun starts ranks, on arrays and under torch, with smddprun and without."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks.launching import clean

JOB = Path(__file__).parents[2] / "world" / "job.py"
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("smddp")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [dist.get_world_size()] * 3
dist.destroy_process_group()
"""


def mpirun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("no mpirun on this machine (Debian: openmpi-bin)")
    command = (program, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *command)
    return subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("case", ["said", "matrix"])
def test_groups_without_torch(case: str):
    done = mpirun(3, sys.executable, str(JOB), case)
    assert done.returncode == 0, done.stderr
    if case == "said":
        assert sorted(re.findall(r"rank (\d) of 3", done.stdout)) == ["0", "1", "2"]
    else:
        checked = re.findall(r"(\d+) checked", done.stdout)
        assert len(checked) == 3 and all(int(number) > 800 for number in checked), done.stdout


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_group_of_torchs(wrapped: bool):
    script = ("" if wrapped else "import smdistributed.dataparallel.torch.torch_smddp\n") + SUM
    done = mpirun(2, *(["smddprun"] if wrapped else []), sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
