"""The environments that launchers leave their ranks: torch's variables, or an error within 5 s with the command to run.

The variables are those of rank 3 of 4, the second of two ranks on the second of two hosts, unless a row says otherwise.
Those of Slurm were read under Slurm 22.05, the others are documented by their launchers.
"""

import functools
import json
import subprocess
import sys

import pytest
from ranks.launching import clean, outputs, start, torchrun

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
#: Reads environments by name, and prints for each torch's variables, or the error and the seconds until it was raised.
COMPLETE = f"""
import json, os, sys, time
from smddp.launch.environment import complete
clean, found = dict(os.environ), {{}}
for name, environment in json.load(sys.stdin).items():
    os.environ.clear()
    os.environ.update(clean, **environment)
    begun = time.monotonic()
    try:
        complete()
        found[name] = [os.environ.get(each) for each in {NAMES}]
    except ValueError as error:
        found[name] = [str(error), time.monotonic() - begun]
json.dump(found, sys.stdout)
"""
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4"}
HYDRA = {**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()}
PALS = {**PMI, "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_APID": "a1"}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "77",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}
JOB = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4"}
SRUN = {
    **JOB,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
#: Of a batch script and of the Slurm task that runs another launcher's daemon.
BATCH = {**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
DAEMON = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}

RANK_3 = ["3", "4", "1", "2", "n1"]
COUNT_UNKNOWN = ["3", "4", "1", None, "n1"]
RANKS = {
    "torchrun": ({**TORCHRUN, **MASTER}, RANK_3),
    "Kubernetes, PyTorchJob": ({"RANK": "3", "WORLD_SIZE": "4", **MASTER}, ["3", "4", None, None, "n1"]),
    "Open MPI": ({**OPENMPI, **MASTER}, RANK_3),
    "Open MPI with srun": ({**OPENMPI, **MASTER, **DAEMON}, RANK_3),
    "MVAPICH2": ({**MVAPICH, **MASTER}, RANK_3),
    "MPICH, Intel MPI": ({**HYDRA, **MASTER}, RANK_3),
    "Intel MPI with srun": ({**HYDRA, **MASTER, **DAEMON}, RANK_3),
    "srun": (SRUN, RANK_3),
    "srun --mpi=pmi2": ({**SRUN, **PMI, "PMI_FD": "11", "PMI_JOBID": "9.0"}, RANK_3),
    "srun --mpi=pmix": ({**SRUN, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.9.0"}, RANK_3),
    "sbatch, one task": ({**BATCH, "SLURM_NTASKS": "1"}, ["0", "1", "0", "1", "127.0.0.1"]),
    "HPE PALS": ({**PALS, **MASTER}, RANK_3),
    "Flux": ({**FLUX, **MASTER}, COUNT_UNKNOWN),
    "Flux with PMI, in Slurm": ({**FLUX, **PMI, **MASTER, **DAEMON}, COUNT_UNKNOWN),
    "Flux, one host": (
        {**FLUX, "FLUX_JOB_NNODES": "1", "FLUX_TASK_LOCAL_ID": "3"},
        ["3", "4", "3", "4", "127.0.0.1"],
    ),
    "jsrun": ({**JSRUN, **MASTER}, RANK_3),
    "PMI with a local rank": ({**PMI, "LOCAL_RANK": "1", **MASTER}, COUNT_UNKNOWN),
}
ERRORS = {
    "sbatch without srun": (BATCH, "srun python script.py"),
    "Kubernetes, Trainer without torchrun": ({"PET_NNODES": "2"}, "torchrun script.py"),
    "PMI without a local rank": ({**PMI, **MASTER}, "LOCAL_RANK is not set"),
    "PMI in a Slurm task": ({**PMI, **MASTER, **DAEMON}, "LOCAL_RANK is not set"),
    "PMIx alone": ({"PMIX_RANK": "3", **MASTER}, "mpirun, srun or torchrun"),
    "HPE PALS without an address": (PALS, "mpiexec --env MASTER_ADDR="),
    "Flux without an address": (FLUX, "flux run --env=MASTER_ADDR="),
    "jsrun without an address": (JSRUN, "jsrun -E MASTER_ADDR="),
    "Hydra without an address": (HYDRA, "mpiexec -genv MASTER_ADDR"),
}


@functools.cache
def completed() -> dict[str, list]:
    given = {name: environment for name, (environment, _) in {**RANKS, **ERRORS}.items()}
    command = [sys.executable, "-c", COMPLETE]
    done = subprocess.run(
        command, env=clean(), input=json.dumps(given), capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("launcher", RANKS)
def test_launcher_variables_determine_the_rank(launcher):
    assert completed()[launcher] == RANKS[launcher][1]


@pytest.mark.parametrize("launcher", ERRORS)
def test_an_unknown_rank_raises_with_the_command_to_run(launcher):
    error, seconds = completed()[launcher]
    assert ERRORS[launcher][1] in error and seconds < 5


def test_a_batch_script_without_srun_is_reported_by_each_entry_point():
    script = (
        "import time, smddp\n"
        "begun = time.monotonic()\n"
        "try: smddp.init()\n"
        "except ValueError as error: print('init:', error)\n"
        "import smdistributed.dataparallel.torch.torch_smddp\n"
        "import torch.sagemaker as tsm\n"
        "try: tsm.init({})\n"
        "except ValueError as error: print('tsm:', error)\n"
        "print('seconds:', time.monotonic() - begun)\n"
    )
    environment = {**clean(), **BATCH}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert "srun python script.py" in found["init"] and "srun python script.py" in found["tsm"], done
    assert "srun python script.py" in done.stderr


def test_ranks_without_a_local_rank_count_their_host():
    script = "import smddp\nwith smddp.init() as comm: print(comm.local_rank, comm.local_size)"
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    ended = outputs(start(["-c", script], 2, lambda *place: {name: torchrun(*place)[name] for name in names}))
    assert [(status, text.split()) for status, text in ended] == [(0, ["0", "2"]), (0, ["1", "2"])]
