"""A Slurm of this test's own, one node: srun starts our ranks, with smddprun and without."""

import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import cluster

EXAMPLES = Path(__file__).parents[3] / "examples"
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("smddp")
total = torch.ones(3)
dist.all_reduce(total)
print(dist.get_rank(), total.tolist(), os.environ["LOCAL_WORLD_SIZE"], os.environ["NODE_RANK"])
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which srun finds it."""
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def srun(slurm: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    command = ("srun", "-n", "2", "--overcommit", *command)
    return subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=100)


def test_a_job_of_two_tasks_is_a_group_under_smddprun(slurm, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SUM)
    done = srun(slurm, "smddprun", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 [2.0, 2.0, 2.0] 2 0", "1 [2.0, 2.0, 2.0] 2 0"]


def test_a_task_finds_the_others_without_smddprun(slurm):
    done = srun(slurm, sys.executable, str(EXAMPLES / "numpy_allreduce.py"))
    assert done.returncode == 0 and "2 ranks over shm" in done.stdout, done.stdout + done.stderr


def test_a_tasks_status_is_sruns(slurm):
    assert srun(slurm, "smddprun", "sh", "-c", "exit 7").returncode == 7


def test_pmi2_keeps_the_local_rank(slurm):
    show = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'])"
    done = srun({**slurm, "MASTER_ADDR": "127.0.0.1"}, "--mpi=pmi2", "smddprun", sys.executable, "-c", show)
    assert sorted(done.stdout.splitlines()) == ["0 0 2", "1 1 2"], done.stdout + done.stderr


def test_a_batch_script_without_srun_is_an_error_that_names_srun(slurm, tmp_path):
    script, output = tmp_path / "job.sh", tmp_path / "output"
    script.write_text(f"#!/bin/sh\n{sys.executable} -c 'import smddp; smddp.init()'\n")
    command = ("sbatch", "--wait", "-n", "2", "--overcommit", "-o", str(output), str(script))
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "srun python script.py" in output.read_text(), output.read_text() + done.stderr
