"""Starts a job's ranks with the environment that a launcher would leave them, on this machine and without torch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("job.py")

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
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


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
    return {name: value for name, value in os.environ.items() if not name.startswith((*_FOREIGN, "SMDDP_"))}


def start(case: str, size: int, environment=torchrun, **more: str) -> list[subprocess.Popen[str]]:
    return ranks([str(JOB), case], size, environment, **more)


def ranks(script: list[str], size: int, environment=torchrun, **more: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, *script],
            env={**clean(), **environment(rank, size, port), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def outputs(started: list[subprocess.Popen[str]], timeout: float = 100) -> list[tuple[int, str]]:
    """Returns exit status and output of every rank; kills hanging ranks."""
    try:
        return [(rank.wait(), text) for rank in started for text, _ in (rank.communicate(timeout=timeout),)]
    finally:
        for rank in started:
            rank.kill()


def run(case: str, size: int, environment=torchrun, **more: str) -> list[str]:
    """Returns the output of each rank of a successful job."""
    ended = outputs(start(case, size, environment, **more))
    assert all(status == 0 for status, _ in ended), "\n".join(
        f"---- rank {rank}: {status}\n{text}" for rank, (status, text) in enumerate(ended)
    )
    return [text for _, text in ended]
