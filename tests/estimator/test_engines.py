"""Engines without their packages: submissions and rejected jobs."""

import json
import os
import re
import subprocess
import sys
import tarfile
from base64 import b64decode
from io import BytesIO

import pytest
from smddp.estimator import PyTorch, shell
from smddp.estimator.engines import ENGINES, pod

ON = {"enabled": True}
TORCHRUN = {"torch_distributed": ON}
IMAGE = "registry.example/train:1"


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('here')\n")

    def estimator(distribution=TORCHRUN, count=2, **more) -> PyTorch:
        given = {"hyperparameters": {"epochs": 3}, "instance_type": "ml.p4d.24xlarge", "image_uri": IMAGE, **more}
        return PyTorch("train.py", distribution=distribution, instance_count=count, **given)

    return estimator


def shown(capsys, estimator, engine, **more) -> str:
    assert estimator.fit(engine=engine, dry_run=True, job_name="j", **more) is None
    return capsys.readouterr().out


def slurm(text: str) -> tuple[dict, str]:
    parameters, _, command = text.partition("\n}\n")
    return json.loads(parameters + "}"), command.strip()


def test_slurm_runs_torchrun_once_on_each_node(make, capsys, tmp_path):
    parameters, command = slurm(shown(capsys, make(), "slurm", engine_options={"partition": "gpu", "time": 30}))
    assert parameters == {
        "job_name": "j",
        "nodes": 2,
        "time": 30,
        "ntasks_per_node": 1,
        "cpus_per_task": 8,
        "gpus_per_node": 8,
        "srun_args": ["--kill-on-bad-exit=1", "--cpus-per-task=8"],
        "partition": "gpu",
    }
    place = "--master_addr '$FIRST_HOST' --master_port '$PORT' --node_rank '$SLURM_NODEID'"
    run = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc_per_node 8 {place} --no-python --"
    folder = tmp_path / "smddp-jobs" / "j"
    script = f"{sys.executable} {folder}/code/train.py --epochs 3"
    assert f"{run} {sys.executable} -m smddp.estimator.rank {folder} {script}" in command
    assert not folder.exists()


def test_slurm_runs_other_forms_as_a_task_for_each_rank(make, capsys):
    form = {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x NCCL_ALGO=Ring"}}}
    text = shown(capsys, make(form), "slurm", processes_per_host=4)
    parameters, _ = slurm(text)
    assert (parameters["nodes"], parameters["ntasks_per_node"]) == (2, 4) and "cpus_per_task" not in parameters
    assert " NCCL_ALGO=Ring " in text and " smddprun " in text and "torch.distributed.run" not in text


def test_a_trainjob_carries_the_job(make, capsys):
    trainjob = json.loads(shown(capsys, make(), "kubernetes", inputs={"train": "/mnt/data"}))
    assert (trainjob["apiVersion"], trainjob["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert trainjob["metadata"] == {"name": "j"} and trainjob["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = trainjob["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == (IMAGE, 2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert " ".join(trainer["command"]) == (
        "python -m smddp.estimator.engines.pod /opt/ml python -m torch.distributed.run --no-python -- "
        "python -m smddp.estimator.rank /opt/ml python /opt/ml/code/train.py --epochs 3"
    )
    env = {each["name"]: each["value"] for each in trainer["env"]}
    assert json.loads(env["SM_HOSTS"]) == ["j-node-0-0", "j-node-0-1"] and env["SM_CHANNEL_TRAIN"] == "/mnt/data"
    assert env["SM_MODEL_DIR"] == "/opt/ml/model" and env["FI_PROVIDER"] == "efa" and "PATH" not in env
    with tarfile.open(fileobj=BytesIO(b64decode(env["SMDDP_JOB_FILES"]))) as archive:
        assert archive.extractfile("code/train.py").read() == b"print('here')\n"


def test_kubernetes_variable_syntax_is_escaped(make, capsys):
    trainjob = json.loads(shown(capsys, make(environment={"A": "$(date)"}), "kubernetes"))
    assert {"name": "A", "value": "$$(date)"} in trainjob["spec"]["trainer"]["env"]


def test_a_pod_makes_the_folder_runs_the_command_and_prints_how_ranks_failed(make, capsys, tmp_path):
    trainjob = json.loads(shown(capsys, make(), "kubernetes"))
    env = {each["name"]: each["value"] for each in trainjob["spec"]["trainer"]["env"]}
    fails = f"import pathlib, sys; pathlib.Path('{tmp_path}/ml/failures/1.json').write_text('{{}}'); sys.exit(3)"
    words = [sys.executable, "-m", "smddp.estimator.engines.pod", f"{tmp_path}/ml", sys.executable]
    both = {**os.environ, "SMDDP_JOB_FILES": env["SMDDP_JOB_FILES"]}
    well = subprocess.run([*words, "train.py"], env=both, capture_output=True, text=True, timeout=60)
    assert (well.returncode, well.stdout) == (0, "here\n"), well.stderr
    badly = subprocess.run([*words, "-c", fails], env=both, capture_output=True, text=True, timeout=60)
    assert (badly.returncode, badly.stdout) == (3, f"{pod.FAILED}{{}}\n"), badly.stderr


REFUSED = [
    ({}, {"engine": "slurn"}, "unknown 'slurn'; did you mean 'slurm'"),
    ({}, {"engine": "slurm", "hosts": ["a:8"]}, "slurm finds the hosts itself: give instance_count"),
    ({}, {"engine": "slurm", "rsh": "rsh"}, "slurm finds the hosts itself"),
    ({}, {"engine": "slurm", "processes_per_host": 0}, "processes_per_host is 0: give 1 or more"),
    ({}, {"engine": "slurm", "engine_options": {"nodes": 2}}, "no 'nodes': give the estimator's instance_count"),
    ({}, {"engine": "torchx", "engine_options": {"gpus": 1}}, "torchx has no 'gpus'; did you mean 'gpu'"),
    ({}, {"engine": "torchx", "engine_options": {"cfg": 1}}, "cfg is 1: give a dict"),
    ({}, {"engine": "kubernetes", "engine_options": {"image": 1}}, "kubernetes has no 'image'"),
    ({}, {"engine": "kubernetes", "engine_options": {"resources": 8}}, "resources is 8: give"),
    ({}, {"engine": "kubernetes", "job_name": "A_b"}, "'A_b' names no TrainJob: give at most 54"),
    ({}, {"engine": "kubernetes", "job_name": "a" * 60}, "give at most 54 of a-z"),
    ({}, {"engine": "kubernetes", "inputs": "s3://b/k"}, "give the path at which the runtime's volumes have it"),
    ({"image_uri": "here"}, {"engine": "kubernetes"}, "image_uri is 'here': give the image that the pods run"),
    ({"environment": dict.fromkeys(map(str, range(128)), "")}, {"engine": "kubernetes"}, "takes 128 variables"),
    ({"hyperparameters": {"a": "x" * 70000}}, {"engine": "kubernetes"}, "put them into a file of source_dir"),
    ({}, {"engine_options": {"time": 1}}, "given without an engine"),
    (
        {"distribution": {"pytorchddp": {"enabled": True, "custom_mpi_options": "--mca a 1"}}},
        {"engine": "slurm"},
        "'--mca' is for mpirun, which does not start these ranks: give -x NAME=VALUE alone",
    ),
]


@pytest.mark.parametrize(("estimator", "job", "says"), REFUSED)
def test_an_unsupported_job_raises_before_any_write(make, tmp_path, estimator, job, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make(**estimator).fit(**{"job_name": "j", **job})
    assert not (tmp_path / "smddp-jobs").exists()


def test_a_job_does_not_begin_in_the_folder_of_another(make, tmp_path):
    (tmp_path / "smddp-jobs" / "j" / "failures").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"there is a job in .*/smddp-jobs/j: give another name, or remove it"):
        make(count=1).fit(processes_per_host=1, job_name="j")


def test_code_that_a_trainjob_cannot_carry_is_an_error(make, tmp_path):
    (tmp_path / "train.py").write_bytes(os.urandom(200_000))
    with pytest.raises(ValueError, match="and a TrainJob carries 131071: give a smaller source_dir"):
        make().fit(engine="kubernetes", job_name="j", dry_run=True)


@pytest.mark.parametrize(("engine", "package"), [*zip(ENGINES, ("submitit", "kubeflow", "torchx"))])
def test_a_package_that_is_not_there_is_named_with_how_to_install_it(make, tmp_path, monkeypatch, engine, package):
    for module in ("submitit", "kubeflow.trainer", "torchx.runner"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"engine '{engine}' needs {package}: pip install {package}"):
        make().fit(engine=engine, job_name="j")
    assert not (tmp_path / "smddp-jobs").exists()


def test_from_a_shell(make, capsys):
    words = ["--engine", "slurm", "--nodes", "2", "-n", "4", "-o", "time=5", "-o", "partition=gpu", "--dry-run"]
    assert shell.main(["train.py", *words]) == 0
    parameters, command = slurm(capsys.readouterr().out)
    assert (parameters["nodes"], parameters["time"], parameters["partition"]) == (2, 5, "gpu")
    assert "--nproc_per_node 4" in command


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "2"], "--nodes is for --engine: name the hosts by --hosts"),
        (["--engine", "slurm", "-o", "time"], "--option takes NAME=VALUE, not 'time'"),
        (["-o", "time=5"], "given without an engine: give engine="),
    ],
)
def test_invalid_shell_arguments_exit_with_status_2(make, capsys, words, says):
    assert shell.main(["train.py", *words]) == 2
    assert says in capsys.readouterr().err
