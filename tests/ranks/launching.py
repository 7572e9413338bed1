"""Start of scripts as ranks on this machine, with the environment of a launcher. Needs no torch."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

#: Returns the variables of one rank, from its number, the number of ranks and a free port.
Launcher = Callable[[int, int, int], dict[str, str]]

# Variables of launchers and jobs, which must not be inherited from the caller of the tests.
_FOREIGN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "PALS_",
    "FLUX_",
    "JSM_",
    "MV2_",
    "PET_",
    "SLURM_",
    "SM_",
    "SMDATAPARALLEL_",
)


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that is free now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Returns different ports of that kind."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def openmpi(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": f"job-{port}",
    }


def mpich(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
        "MASTER_PORT": str(port),
    }


def slurm(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
    }


LAUNCHERS = [torchrun, openmpi, mpich, slurm]


def clean() -> dict[str, str]:
    """Returns this process's variables without those of launchers and of smddp."""
    return {name: value for name, value in os.environ.items() if not name.startswith((*_FOREIGN, "SMDDP_"))}


def start(
    command: Sequence[str], size: int, environment: Launcher = torchrun, **more: str
) -> list[subprocess.Popen[str]]:
    """Starts `size` ranks of a Python script with its arguments. The end of one rank does not stop the others."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**clean(), **environment(rank, size, port), **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def outputs(started: list[subprocess.Popen[str]], seconds: float = 100) -> list[tuple[int, str]]:
    """Returns exit status and output of every rank. Kills the remaining ranks after `seconds`."""
    until = time.monotonic() + seconds
    ended = []
    try:
        for rank in started:
            try:
                text, _ = rank.communicate(timeout=max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                rank.kill()
                text, _ = rank.communicate()
            ended.append((rank.returncode, text))
    finally:
        for rank in started:
            rank.kill()
    return ended
