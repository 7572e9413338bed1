"""Real engines run an estimator's jobs: Slurm by submitit, torchx's local scheduler, Kubeflow's client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_api
import pytest
from ranks.launching import free_port
from slurm_cluster import cluster
from smddp.estimator import LaunchError, PyTorch

ON = {"enabled": True}
TORCHRUN = {"torch_distributed": ON}
DATA_PARALLEL = {"smdistributed": {"dataparallel": ON}}
#: A rank of a numpy program; torch takes seconds to start.
TRAIN = """
import argparse, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--fails", default="")
given = parser.parse_args()
import numpy as np, smddp
me = smddp.init()
total = np.full(3, me.rank + 1.0)
me.all_reduce(total)
line = f"rank {me.rank} of {me.size}: {total[0]} on {os.environ['SM_CURRENT_HOST']} of {os.environ['SM_HOSTS']}\\n"
os.write(1, line.encode())
if me.rank == 1 and given.fails == "key":
    {}["the user's own"]
if me.rank == 1 and given.fails == "kill":
    os.kill(os.getpid(), 9)
if given.fails == "slow":
    time.sleep(600)
if given.fails:
    me.all_reduce(total)
if me.rank == 0:
    open(os.path.join(os.environ["SM_MODEL_DIR"], "model.txt"), "w").write("seven")
me.close()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def estimator(place: Path, form, count: int = 1, **hyperparameters) -> PyTorch:
    return PyTorch(
        str(place / "train.py"),
        framework_version="2.2.0",
        py_version="py310",
        instance_type="local",
        instance_count=count,
        distribution=form,
        output_path=str(place / "jobs"),
        hyperparameters=hyperparameters,
    )


def ended_well(made: PyTorch, place: Path, said: str) -> None:
    folder = place / "jobs" / "j"
    for rank in range(2):
        assert f"[rank {rank}] rank {rank} of 2: 3.0 on " in said
        assert f"rank {rank} of 2: 3.0" in (folder / "logs" / f"rank-{rank}.out").read_text()
    assert (folder / "output" / "success").exists() and (folder / "model.tar.gz").exists()


def named(error: LaunchError) -> None:
    """The rank that failed, by its own words."""
    failure = error.failure
    # The launcher may end the rank between its traceback and its exit.
    assert failure is not None and failure.rank == 1 and failure.status in (1, -signal.SIGTERM), error
    assert 'KeyError: "the user\'s own"' in failure.last and f"rank 1 (host {failure.host}, pid " in str(error)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    pytest.importorskip("submitit", reason="submitit is not installed: make test-launch")
    # Names that resolve, so that ranks of both meet.
    with cluster(tmp_path_factory.mktemp("slurm"), ["localhost"], cores=4) as environment:
        yield environment


@pytest.fixture
def on_slurm(slurm, monkeypatch):
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_")) and name not in slurm]:
        monkeypatch.delenv(name)


FORMS = {"torchrun": (TORCHRUN, 1, 2), "torchrun of two nodes": (TORCHRUN, 2, 1), "tasks": (DATA_PARALLEL, 1, 2)}
FORMS["tasks of two nodes"] = (DATA_PARALLEL, 2, 1)


@pytest.mark.parametrize("name", FORMS)
def test_slurm_runs_a_job(on_slurm, place, capfd, name):
    form, nodes, each = FORMS[name]
    made = estimator(place, form, nodes)
    job = {"engine": "slurm", "processes_per_host": each, "job_name": "j", "engine_options": {"time": 5}}
    made.fit(dry_run=True, **job)
    parameters = json.loads(capfd.readouterr().out.partition("\n}\n")[0] + "}")
    made.fit(**job)
    said = capfd.readouterr().out
    ended_well(made, place, said)
    assert said.count(f'of ["localhost","{socket.gethostname()}"]') == (2 if nodes == 2 else 0), said
    (script,) = (place / "jobs" / "j" / "submitit").glob("*_submission.sh")
    for key in ("nodes", "ntasks_per_node", "job_name", "time"):
        assert f"#SBATCH --{key.replace('_', '-')}={parameters[key]}\n" in script.read_text()


@pytest.mark.parametrize("form", [TORCHRUN, DATA_PARALLEL])
def test_slurm_a_rank_that_fails_is_named(on_slurm, place, form):
    with pytest.raises(LaunchError) as caught:
        estimator(place, form, fails="key").fit(engine="slurm", processes_per_host=2, job_name="j", logs=False)
    named(caught.value)
    assert "KeyError" in (place / "jobs" / "j" / "output" / "failure").read_text()


def test_slurm_a_killed_rank_is_named_by_its_signal(on_slurm, place):
    with pytest.raises(LaunchError, match=r"rank 1 \(host .*, pid \d+\) was ended by signal SIGKILL") as caught:
        estimator(place, DATA_PARALLEL, fails="kill").fit(engine="slurm", processes_per_host=2, logs=False)
    assert caught.value.failure.status == -signal.SIGKILL


def test_slurm_a_job_that_is_stopped_leaves_the_queue(on_slurm, place):
    made = estimator(place, DATA_PARALLEL, fails="slow")
    made.fit(engine="slurm", processes_per_host=2, job_name="j", wait=False, logs=False)
    log = place / "jobs" / "j" / "logs" / "rank-1.out"
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    made.latest_training_job.stop()
    assert subprocess.run(["squeue", "--noheader"], capture_output=True, text=True).stdout == ""
    with pytest.raises(LaunchError):
        made.latest_training_job.wait()


def test_slurm_reports_sbatch_errors(on_slurm, place):
    with pytest.raises(LaunchError, match=r"Slurm rejected the job: [\s\S]*[Ii]nvalid partition"):
        estimator(place, TORCHRUN).fit(engine="slurm", engine_options={"partition": "none"}, logs=False)


@pytest.mark.parametrize("count", [1, 2])
def test_torchx_runs_a_job_on_its_local_scheduler(place, capfd, count):
    pytest.importorskip("torchx", reason="torchx is not installed: make test-launch")
    made = estimator(place, TORCHRUN, count)
    job = {"engine": "torchx", "processes_per_host": 2 // count, "job_name": "j", "port": free_port()}
    made.fit(dry_run=True, **job)
    assert f"--nproc_per_node {2 // count}" in capfd.readouterr().out
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    made.fit(**job)
    said = capfd.readouterr().out
    ended_well(made, place, said)
    assert f"on algo-{count} of " in said
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_torchx_a_rank_that_fails_is_named(place):
    pytest.importorskip("torchx", reason="torchx is not installed: make test-launch")
    with pytest.raises(LaunchError) as caught:
        estimator(place, TORCHRUN, fails="key").fit(engine="torchx", processes_per_host=2, logs=False)
    named(caught.value)


def test_torchx_writes_for_its_other_schedulers(place, capfd):
    pytest.importorskip("torchx", reason="torchx is not installed: make test-launch")
    options = {"scheduler": "slurm", "cfg": {"partition": "gpu"}, "cpu": 4}
    estimator(place, TORCHRUN, 2).fit(engine="torchx", engine_options=options, dry_run=True, job_name="j")
    said = capfd.readouterr().out
    assert "sbatch" in said and "--partition=gpu" in said and "-m -- smddp.estimator.rank" in said
    with pytest.raises(ValueError, match="torchx has no scheduler 'slurn'; it has local_docker"):
        estimator(place, TORCHRUN).fit(engine="torchx", engine_options={"scheduler": "slurn"}, job_name="j")


def trainjob(place: Path, capfd, **hyperparameters) -> dict:
    made = estimator(place, TORCHRUN, 2, **hyperparameters)
    made.image_uri = "registry.example/train:1"
    made.fit(engine="kubernetes", dry_run=True, job_name="j", engine_options={"resources": {"limits": {"cpu": "8"}}})
    return json.loads(capfd.readouterr().out)


def test_a_trainjob_is_one_of_kubeflows(place, capfd):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api: make test-launch")
    manifest = trainjob(place, capfd)
    # from_dict drops unknown fields.
    assert models.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict() == manifest


@pytest.fixture
def kubernetes(place):
    """`smddp launch --engine kubernetes`, and what is in its cluster."""
    pytest.importorskip("kubeflow", reason="kubeflow is not installed: make test-launch")
    with kubernetes_api.cluster(place, free_port()) as (cluster, config):
        env = {**os.environ, "KUBECONFIG": str(config), "OMP_NUM_THREADS": "1"}
        words = ["--engine", "kubernetes", "--nodes", "2", "--image", "registry.example/train:1", "--job-name", "j"]
        command = [sys.executable, "-m", "smddp", "launch", "train.py", *words]

        def launch(*more: str) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            return subprocess.Popen([*command, *more], cwd=place, env=env, stdout=pipe, stderr=pipe, text=True)

        yield launch, cluster


def test_kubernetes_runs_a_job(kubernetes, place):
    """Kubeflow's own client; the API and the pods are stand-ins."""
    launch, cluster = kubernetes
    with launch() as job:
        said, errors = job.communicate(timeout=100)
    assert job.returncode == 0, said + errors
    assert "TrainJob j in tests" in said and "TrainJob j is Complete" in said
    for rank in range(2):
        assert f"rank {rank} of 2: 3.0 on {socket.gethostname()} of" in said
    folder = place / "smddp-jobs" / "j"
    assert (folder / "output" / "success").exists() and (place / "pod-0" / "model" / "model.txt").exists()
    sent = json.loads((folder / "trainjob.yaml").read_text())
    assert sent["spec"] == cluster.trainjob["spec"]


def test_kubernetes_a_rank_that_fails_is_named(kubernetes):
    launch, _ = kubernetes
    with launch("--", "--fails", "key") as job:
        said, errors = job.communicate(timeout=100)
    assert job.returncode == 1 and "rank 1 (host " in errors, said + errors
    assert 'KeyError: "the user\'s own"' in errors and "Traceback (most recent call last)" in errors


def test_kubernetes_ctrl_c_deletes_the_job(kubernetes, place):
    launch, cluster = kubernetes
    with launch("--", "--fails", "slow") as job:
        until = time.monotonic() + 60
        log = place / "pod-0.log"
        while not (log.exists() and "rank 0 of 2" in log.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    assert job.returncode == 130 and cluster.trainjob is None
    assert all(pod.poll() is not None for pod in cluster.pods)
