"""Jobs as a user starts them: an estimator's `fit` and `smddp launch`, with real ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from ranks.launching import free_port
from smddp.estimator import LaunchError, PyTorch
from smddp.launch.local import count_devices

ON = {"enabled": True}
FORMS = {
    "torchrun": {"torch_distributed": ON},
    "data parallel": {"smdistributed": {"dataparallel": ON}},
    "mpi": {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "--oversubscribe"}},
}
#: A rank of a numpy program; torch takes seconds to start.
TRAIN = """
import argparse, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--fails", default="")
parser.add_argument("--pids", default="")
given = parser.parse_args()
import numpy as np, smddp
me = smddp.init()
if given.pids:
    pathlib.Path(given.pids, str(me.rank)).write_text(str(os.getpid()))
total = np.full(3, me.rank + 1.0)
me.all_reduce(total)
os.write(1, f"rank {me.rank} of {me.size}: {total[0]} after {given.epochs}\\n".encode())
if me.rank == 1 and given.fails == "key":
    {}["the user's own"]
if me.rank == 1 and given.fails == "kill":
    os.kill(os.getpid(), 9)
if me.rank == 1 and given.fails == "exit":
    sys.exit(3)
if given.fails == "slow":
    time.sleep(600)
if given.fails:
    me.all_reduce(total)
if me.rank == 0:
    text = pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "x.txt").read_text()
    pathlib.Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text(text)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], "env.json").write_text(json.dumps(dict(os.environ)))
me.close()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("seven")
    (tmp_path / "pids").mkdir()
    # Replacement of ssh: the "host" is this machine.
    (tmp_path / "rsh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (tmp_path / "rsh").chmod(0o755)
    return tmp_path


def estimator(place: Path, form="data parallel", count=1, **hyperparameters) -> PyTorch:
    return PyTorch(
        str(place / "train.py"),
        framework_version="2.2.0",
        py_version="py310",
        instance_type="local",
        instance_count=count,
        distribution=FORMS[form],
        output_path=f"file://{place}/jobs",
        hyperparameters={"pids": str(place / "pids"), **hyperparameters},
    )


def alive(place: Path) -> list[int]:
    """Returns the ranks that are still alive after the time that a killed process may take to exit."""
    pids = [int(file.read_text()) for file in (place / "pids").iterdir()]
    until = time.monotonic() + 5
    while time.monotonic() < until and (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]):
        time.sleep(0.05)
    assert len(pids) == 2
    return left if pids else []


@pytest.mark.parametrize("form", FORMS)
def test_ranks_run_and_the_jobs_folder_has_what_they_leave(place, form, capfd):
    made = estimator(place, form, epochs=3)
    made.fit({"train": f"file://{place}/data"}, hosts=["localhost:2"], job_name="j")
    folder = place / "jobs" / "j"
    said = capfd.readouterr()
    for rank in range(2):
        line = f"rank {rank} of 2: 3.0 after 3"
        assert line in (folder / "logs" / f"rank-{rank}.out").read_text() and line in said.out
    if form != "torchrun" and shutil.which("mpirun") is None:
        assert "no mpirun on this machine: smddprun starts the ranks" in said.err
    with tarfile.open(folder / "model.tar.gz") as archive:
        assert archive.extractfile("model.txt").read() == b"seven"
    with tarfile.open(folder / "output.tar.gz") as archive:
        env = json.load(archive.extractfile("env.json"))
    assert (folder / "output" / "success").exists() and not (folder / "output" / "failure").exists()
    assert made.model_data == f"file://{folder}/model.tar.gz"
    assert (env["SM_HOSTS"], env["SM_CURRENT_HOST"], env["SM_HP_EPOCHS"]) == ('["localhost"]', "localhost", "3")
    assert env["SM_MODEL_DIR"] == str(folder / "model") and env["SM_NUM_GPUS"] == str(count_devices())
    sent = json.loads((folder / "input" / "config" / "hyperparameters.json").read_text())
    assert sent["epochs"] == "3"


@pytest.mark.parametrize("form", FORMS)
def test_the_failed_rank_is_reported_with_its_stderr_and_all_ranks_end(place, form):
    begun = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        estimator(place, form, fails="key").fit(hosts=["localhost:2"], logs=False, job_name="j")
    failure = caught.value.failure
    assert (failure.rank, failure.host, failure.status) == (1, "localhost", 1), caught.value
    assert 'KeyError: "the user\'s own"' in failure.last
    assert "rank 1 (host localhost, pid " in str(caught.value) and "ended with exit status 1" in str(caught.value)
    assert "KeyError" in (place / "jobs" / "j" / "output" / "failure").read_text()
    assert alive(place) == []
    assert time.monotonic() - begun < 60


def test_a_killed_rank_is_named_by_its_signal(place):
    with pytest.raises(LaunchError, match=r"rank 1 \(host localhost, pid \d+\) was ended by signal SIGKILL") as caught:
        estimator(place, fails="kill").fit(hosts=["localhost:2"], logs=False)
    assert caught.value.failure.status == -signal.SIGKILL and alive(place) == []


def test_remote_ranks_are_started_reported_and_ended(place):
    """A command in place of ssh runs the remote ranks here."""
    port = free_port()
    hosts, more = ["localhost:1", "elsewhere:1"], {"rsh": str(place / "rsh"), "port": port}
    made = estimator(place, "torchrun", 2)
    made.fit({"train": f"{place}/data"}, hosts=hosts, logs=False, job_name="j", **more)
    assert "rank 1 of 2" in (place / "jobs" / "j" / "logs" / "rank-1.out").read_text()
    with pytest.raises(LaunchError) as caught:
        estimator(place, "torchrun", 2, fails="key").fit({"train": f"{place}/data"}, hosts=hosts, logs=False, **more)
    assert (caught.value.failure.rank, caught.value.failure.host) == (1, "elsewhere")
    assert alive(place) == []


def test_a_host_that_cannot_be_reached_is_named(place):
    (place / "rsh").write_text("#!/bin/sh\necho no route to $1 >&2; exit 255\n")
    with pytest.raises(LaunchError, match="elsewhere cannot be used: no route to elsewhere"):
        estimator(place, "torchrun", 2).fit(hosts=["localhost:1", "elsewhere:1"], logs=False, rsh=str(place / "rsh"))


def test_a_job_that_is_not_waited_for_can_be_stopped(place):
    made = estimator(place, fails="slow")
    made.fit(wait=False, hosts=["localhost:2"], logs=False)
    until = time.monotonic() + 60
    while len(list((place / "pids").iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    made.latest_training_job.stop()
    assert alive(place) == []


def test_a_dry_run_prints_the_commands_and_writes_nothing(place, capsys):
    (command,) = estimator(place, "torchrun").fit({"train": f"{place}/data"}, dry_run=True, hosts=["localhost:2"])
    assert str(command) == capsys.readouterr().out.strip() and "--nproc_per_node 2" in str(command)
    assert not (place / "jobs").exists()


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("/not/there", "there is nothing at '/not/there'"),
        ({"train": "http://a/b"}, "neither a path nor file:// nor s3://"),
        ({"train": 7}, "channel 'train' is 7: give a path"),
    ],
)
def test_invalid_inputs_are_reported_before_the_start(place, inputs, says):
    with pytest.raises(ValueError, match=says):
        estimator(place).fit(inputs, hosts=["localhost:2"])
    assert not (place / "jobs").exists()


def launch(place: Path, *words: str) -> subprocess.Popen[str]:
    # A separate process group, so that Ctrl-C reaches all its processes.
    return subprocess.Popen(
        [Path(sys.executable).parent / "smddp", "launch", "train.py", "-n", "2", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


NO_TORCHRUN = ("--distribution", json.dumps(FORMS["data parallel"]))


def test_from_a_shell_arguments_reach_the_script_and_its_exit_status_comes_back(place):
    with launch(place, "--input", "train=data", "--job-name", "j", "--", "--epochs", "5") as well:
        said, errors = well.communicate(timeout=100)
    assert well.returncode == 0, said + errors
    assert "rank 1 of 2: 3.0 after 5" in said
    with launch(place, *NO_TORCHRUN, "--", "--fails", "exit") as failed:
        said, errors = failed.communicate(timeout=100)
    assert failed.returncode == 3 and "rank 1 (host localhost" in errors, said + errors
    with launch(place, "--distribution", '{"mpo": {}}') as wrong:
        said, errors = wrong.communicate(timeout=100)
    assert wrong.returncode == 2 and "'mpo' is none" in errors and "Traceback" not in errors


def test_script_imports_the_modules_beside_it(place):
    (place / "beside.py").write_text("WORD = 'found beside the script'\n")
    (place / "importing.py").write_text("import beside\nprint(beside.WORD)\n")
    command = [Path(sys.executable).parent / "smddp", "launch", "importing.py", "-n", "1", "--distribution", "{}"]
    sent = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100)
    assert sent.returncode == 0 and "found beside the script" in sent.stdout, sent.stderr
    alone = subprocess.run([*command, "--script-only"], cwd=place, capture_output=True, text=True, timeout=100)
    assert alone.returncode != 0 and "No module named 'beside'" in alone.stdout + alone.stderr
    with (place / "large").open("wb") as file:
        file.truncate(65 << 20)
    large = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=100)
    assert large.returncode == 2 and "more than 64 MiB" in large.stderr and large.stderr.count("\n") == 1, large.stderr


def test_ctrl_c_ends_all_ranks(place):
    with launch(place, *NO_TORCHRUN, "--", "--fails", "slow", "--pids", f"{place}/pids") as job:
        while "rank" not in job.stdout.readline():
            assert job.poll() is None
        until = time.monotonic() + 60
        while len(list((place / "pids").iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGINT)
        _, errors = job.communicate(timeout=30)
    assert job.returncode == 130, errors
    assert alive(place) == [] and "Traceback" not in errors
