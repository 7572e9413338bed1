"""Restarts after a lost host: a job of two hosts ends with the losses of an undisturbed run."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from smddp.estimator import LaunchError, PyTorch, agent
from smddp.estimator.job import Folder
from smddp.estimator.restarts import Restarts
from smddp.estimator.running import Failure, launch_error

#: Least squares on two ranks. Rank 1 halts once in step 4, and the test ends its host there.
TRAIN = """
import json, os, pathlib, sys, time
import numpy as np, smddp
if "RANK" not in os.environ:
    hosts = json.loads(os.environ["SM_HOSTS"])
    rank = hosts.index(os.environ["SM_CURRENT_HOST"])
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=hosts[0], MASTER_PORT=sys.argv[-1])
me = smddp.init()
kept, marker = pathlib.Path(sys.argv[2], "state.json"), pathlib.Path(sys.argv[4])
state = json.loads(kept.read_text()) if kept.exists() else {"step": 0, "weight": [0.0] * 3, "losses": []}
weight = np.array(state["weight"])
random = np.random.default_rng(me.rank)
data = [(random.standard_normal((8, 3)), random.standard_normal(8)) for _ in range(8)]
for step in range(state["step"], 8):
    if step == 4 and me.rank == 1 and not marker.exists():
        marker.write_text(str(os.getpid()))
        time.sleep(600)
    inputs, targets = data[step]
    error = inputs @ weight - targets
    total = np.append(inputs.T @ error / 16, (error**2).sum() / 16)
    me.all_reduce(total)
    weight -= 0.1 * total[:3]
    state["losses"].append(float(total[3]))
    state.update(step=step + 1, weight=weight.tolist())
    if me.rank == 0:
        new = kept.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.rename(kept)
        print(f"loss={total[3]:.6f}")
if me.rank == 0:
    pathlib.Path(os.environ["SM_MODEL_DIR"], "losses.json").write_text(json.dumps(state["losses"]))
me.close()
"""
pytestmark = pytest.mark.filterwarnings("ignore:checkpoint_local_path")
FORMS = [None, pytest.param({"torch_distributed": {"enabled": True}}, marks=pytest.mark.slow, id="torchrun")]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    # A command in place of ssh: both hosts are this machine.
    (tmp_path / "rsh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (tmp_path / "rsh").chmod(0o755)
    return tmp_path


def run(place: Path, name: str, distribution=None, **given) -> PyTorch:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = PyTorch(
        str(place / "train.py"),
        image_uri="x",
        instance_type="local",
        instance_count=2,
        distribution=distribution,
        output_path=str(place / "jobs"),
        checkpoint_s3_uri=str(place / "checkpoints" / name),
        checkpoint_local_path=str(place / "local"),
        hyperparameters={"a": "/opt/ml/checkpoints", "marker": str(place / name), "port": port},
        metric_definitions=[{"Name": "loss", "Regex": r"loss=([0-9.]+)"}],
        **given,
    )
    hosts = ["localhost:1", "elsewhere:1"]
    made.fit(hosts=hosts, rsh=str(place / "rsh"), port=port, job_name=name, logs=False, wait=False)
    return made


def tree(root: int) -> list[int]:
    """Returns a process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def kill_host(made: PyTorch, marker: Path) -> None:
    """Kills all processes of the second host once its rank has written `marker`."""
    until = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < until:
        time.sleep(0.02)
    for pid in tree(made.latest_training_job._run._agents[1]._process.pid):
        # Ranks end with their agent, so some of these may have ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("distribution", FORMS)
def test_a_job_that_loses_a_host_ends_with_the_losses_of_an_undisturbed_run(place, distribution):
    (place / "undisturbed").touch()
    expected = run(place, "undisturbed", distribution)
    expected.latest_training_job.wait()
    made = run(place, "spot", distribution, use_spot_instances=True, max_run=100, max_wait=200)
    kill_host(made, place / "spot")
    job = made.latest_training_job
    job.wait()
    losses = [json.loads((place / "jobs" / name / "model/losses.json").read_text()) for name in ("undisturbed", "spot")]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert (job.restarts, job.status) == (1, "Completed")
    summary = json.loads((place / "jobs/spot/job.json").read_text())
    assert summary["Restarts"] == 1 and summary["FinalMetricDataList"][0]["Value"] == pytest.approx(
        losses[0][-1], abs=1e-6
    )
    assert not list((place / "jobs/spot/failures").iterdir())


def test_a_lost_host_is_an_error_without_spot_instances_and_after_the_last_attempt(place):
    made = run(place, "plain")
    kill_host(made, place / "plain")
    with pytest.raises(LaunchError) as raised:
        made.latest_training_job.wait()
    assert raised.value.lost_host and made.latest_training_job.restarts == 0


def test_unreachable_hosts_end_the_job_at_max_wait(place):
    (place / "rsh").write_text("#!/bin/sh\nexit 255\n")
    with pytest.raises(LaunchError, match="elsewhere cannot be used") as raised:
        run(place, "away", use_spot_instances=True)
    # Only a job that has begun is restarted.
    assert raised.value.lost_host
    made = run_then_lose(place, max_wait=2)
    with pytest.warns(UserWarning, match="was stopped after max_wait=2 seconds"):
        made.latest_training_job.wait()
    assert made.latest_training_job.status == "Stopped" and made.latest_training_job.restarts >= 1


def run_then_lose(place: Path, **given) -> PyTorch:
    """A job whose second host is killed and then refuses connections."""
    (place / "rsh").write_text(f'#!/bin/sh\ntest -e {place}/lost && exit 255\nshift\nexec sh -c "$*"\n')
    made = run(place, "lost", use_spot_instances=True, **given)
    threading.Thread(target=kill_host, args=(made, place / "lost"), daemon=True).start()
    return made


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_wait": 5}, "without use_spot_instances=True"),
        ({"use_spot_instances": True, "max_run": 10, "max_wait": 5}, "less than max_run=10"),
        ({"use_spot_instances": True, "max_wait": "5"}, "max_wait is '5': expected a time limit in seconds"),
        ({"max_retry_attempts": 31}, "expected a number from 1 to 30"),
    ],
)
def test_limits_that_the_service_refuses_are_errors(given, says):
    with pytest.raises(ValueError, match=says):
        PyTorch("a.py", image_uri="x", instance_type="local", **given)


@pytest.mark.parametrize("given", [{"use_spot_instances": True}, {"max_retry_attempts": 2}])
def test_an_engine_restarts_jobs_itself(given):
    with pytest.raises(ValueError, match="slurm restarts jobs by its own rules"):
        PyTorch("a.py", image_uri="x", instance_type="local", **given).fit(engine="slurm", dry_run=True)


def test_only_a_lost_host_restarts_a_job():
    lost, failed = (LaunchError("", Path(), lost_host=lost) for lost in (True, False))
    spot, counted = Restarts(spot=True), Restarts(attempts=2)
    assert [spot.pause(lost, number) for number in (0, 1, 9)] == [1, 2, 60]
    assert spot.pause(failed, 0) is None and spot.pause(KeyboardInterrupt(), 0) is None
    assert [counted.pause(lost, number) for number in (0, 1, 2)] == [1, 2, None]
    assert Restarts().pause(lost, 0) is None


def test_a_rank_that_reports_a_lost_peer_is_not_a_lost_host():
    """Its peer may have ended with exit status 0, which no rank reports: a restart would repeat that without an end."""
    failure = Failure(1, "localhost", 7, 1, 0.0, "smddp.PeerLostError: rank 0 left the group")
    assert not launch_error([failure], Path()).lost_host


def test_results_that_are_links_keep_their_targets_in_a_restart(tmp_path):
    folder = Folder(tmp_path / "job")
    folder.make()
    (shared := tmp_path / "shared").mkdir()
    (shared / "kept").touch()
    folder.model.rmdir()
    folder.model.symlink_to(shared)
    folder.reset()
    assert (shared / "kept").exists() and folder.model.is_dir() and not folder.model.is_symlink()


def test_a_restart_ends_ranks_that_ignore_the_end_of_their_agent(tmp_path):
    script = "trap '' TERM; echo ready; sleep 60"
    rank = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert rank.stdout is not None and rank.stdout.readline()
    Folder(tmp_path).make()
    agent._note_group(tmp_path, rank.pid)
    agent._end_earlier_attempt(tmp_path)
    assert rank.wait(10) < 0
    agent._end_earlier_attempt(tmp_path)
