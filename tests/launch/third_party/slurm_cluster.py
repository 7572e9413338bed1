"""A Slurm of one test's own: its daemons, on this machine, with as many nodes as asked for."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks.launching import free_ports

BIN = Path(sys.executable).parent
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/control
SlurmdSpoolDir={folder}/node-%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} State=UNKNOWN\n"


@contextlib.contextmanager
def cluster(folder: Path, others: Sequence[str] = (), cores: int | None = None) -> Iterator[dict[str, str]]:
    """The environment in which srun and sbatch find it. others: names of nodes beside this machine's own."""
    for program in ("slurmctld", "slurmd", "srun", "sinfo"):
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
            pytest.skip(f"no {program} on this machine (Debian: slurmctld, slurmd, slurm-client)")
    if os.geteuid() != 0:
        pytest.skip("a slurmd that starts tasks runs as root")
    host = socket.gethostname().split(".")[0]
    names = [host, *others]
    control, *ports = free_ports(1 + len(names))
    for part in ("control", *(f"node-{name}" for name in names)):
        (folder / part).mkdir()
    config = folder / "slurm.conf"
    nodes = [
        NODE.format(name=name, host=host, port=port, cores=cores or os.cpu_count()) for name, port in zip(names, ports)
    ]
    config.write_text(CONFIG.format(folder=folder, host=host, control=control) + "".join(nodes))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))},
        "SLURM_CONF": str(config),
        "PATH": f"{BIN}:{os.environ['PATH']}:/usr/sbin",
        "OMP_NUM_THREADS": "1",
    }
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in names)]
    daemons = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        deadline = time.monotonic() + 60
        idle = ["sinfo", "--noheader", "--Node", "--states", "idle"]
        while len(subprocess.run(idle, env=environment, capture_output=True).stdout.splitlines()) < len(names):
            logs = [log.read_text()[-2000:] for log in folder.glob("*.log")]
            assert time.monotonic() < deadline and all(daemon.poll() is None for daemon in daemons), logs
            time.sleep(0.1)
        yield environment
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait(30)
