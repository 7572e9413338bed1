"""A Slurm of this test's own, one node: srun starts our ranks, with smddprun and without."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/control
SlurmdSpoolDir={folder}/node
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/node.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/node.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("smddp")
total = torch.ones(3)
dist.all_reduce(total)
print(dist.get_rank(), total.tolist(), os.environ["LOCAL_WORLD_SIZE"], os.environ["NODE_RANK"])
dist.destroy_process_group()
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which srun finds it."""
    for program in ("slurmctld", "slurmd", "srun", "sinfo"):
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
            pytest.skip(f"no {program} on this machine (Debian: slurmctld, slurmd, slurm-client)")
    if os.geteuid() != 0:
        pytest.skip("a slurmd that starts tasks runs as root")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("control", "node"):
        (folder / name).mkdir()
    control, node = free_ports(2)
    host = socket.gethostname().split(".")[0]
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=host, control=control, node=node, user="root", cores=os.cpu_count())
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))},
        "SLURM_CONF": str(config),
        "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin",
        "OMP_NUM_THREADS": "1",
    }
    daemons = [subprocess.Popen([name, "-D"], env=environment) for name in ("slurmctld", "slurmd")]
    try:
        deadline = time.monotonic() + 60
        while "idle" not in subprocess.run(["sinfo"], env=environment, capture_output=True, text=True).stdout:
            logs = [log.read_text()[-2000:] for log in folder.glob("*.log")]
            assert time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons), logs
            time.sleep(0.1)
        yield environment
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(30)


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
