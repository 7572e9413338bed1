"""Restarts after a lost host: a job of two hosts ends with the losses of an undisturbed run."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ranks.launching import free_port
from smddp.estimator import LaunchError, PyTorch, archives, processes, running
from smddp.estimator.commands import Command, Host
from smddp.estimator.job import Folder
from smddp.estimator.restarts import Limits, Restarts
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
    port = free_port()
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
def test_a_job_that_loses_a_host_ends_with_the_losses_of_an_undisturbed_run(place, distribution, monkeypatch):
    (place / "undisturbed").touch()
    expected = run(place, "undisturbed", distribution)
    expected.latest_training_job.wait()
    sent: list[str] = []
    pack = archives.packed
    monkeypatch.setattr(archives, "packed", lambda folder: sent.append(pack(folder)) or sent[-1])
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
    # The restart sends the files of the first attempt, without files that ranks have written since.
    assert len(sent) == 1


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
    # max_run counts running ranks alone, so max_wait comes first.
    made = run_then_lose(place, max_run=5, max_wait=5)
    with pytest.warns(UserWarning, match="was stopped after max_wait=5 seconds"):
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
def test_limits_beyond_the_service_raise(given, says):
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
    folder.reset(2)
    assert (shared / "kept").exists() and folder.model.is_dir() and not folder.model.is_symlink()


def test_a_host_that_does_not_answer_ends_the_job_at_max_wait(place):
    (place / "rsh").write_text("#!/bin/sh\nexec sleep 60\n")
    begun = time.monotonic()
    with pytest.raises(LaunchError, match=r"the job was stopped \(max_wait or stop\(\)\) before .*elsewhere"):
        run(place, "silent", use_spot_instances=True, max_wait=1)
    assert time.monotonic() - begun < 20


def test_max_run_counts_the_time_of_running_ranks_over_all_attempts():
    reached: list[tuple[str, float]] = []
    begun = time.monotonic()
    limits = Limits(1, 60, lambda name: reached.append((name, time.monotonic() - begun)))
    for _ in range(2):
        limits.ranks_begin()
        time.sleep(0.3)
        limits.ranks_ended()
        time.sleep(0.4)  # the pause before a restart
    limits.ranks_begin()
    time.sleep(0.1)
    assert not reached
    time.sleep(0.6)
    limits.cancel()
    assert [name for name, _ in reached] == ["max_run"] and reached[0][1] > 1.75


#: A rank in a separate session, as under torchrun, that ignores SIGTERM.
STUBBORN = "setsid sh -c 'trap : TERM; touch MARKER; while :; do sleep 1; done' >/dev/null 2>&1 &"


@pytest.fixture
def folder(tmp_path) -> Folder:
    made = Folder(tmp_path / "job")
    made.make()
    return made


def command(folder: Folder, script: str) -> Command:
    return Command("localhost", ["sh", "-c", script], {"SM_OUTPUT_DIR": str(folder.output)})


def begin(folder: Folder, script: str, attempt: int = 1) -> running.Run:
    return running.Run(
        folder.path, [Host("localhost", 1)], [command(folder, script)], folder.code, rsh="false", attempt=attempt
    )


def wait_for(file: Path) -> None:
    until = time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert file.exists()


@pytest.mark.parametrize("ends_by", ["stop", "restart", "failure"])
def test_no_rank_outlives_its_attempt(folder, ends_by):
    """Ranks that ignore SIGTERM, outside of the process group of the host's command."""
    marker = folder.path / "marker"
    script = STUBBORN.replace("MARKER", str(marker))
    end = f"while [ ! -e {marker} ]; do sleep 0.05; done; exit 3" if ends_by == "failure" else "sleep 60"
    one = begin(folder, f"{script} {end}")
    wait_for(marker)
    assert len(processes.of_job(folder.path)) > 1 or ends_by == "failure"
    if ends_by == "restart":
        agent = one._agents[0]._process
        agent.kill()
        agent.wait()
        begin(folder, "true", attempt=2).wait()
    elif ends_by == "failure":
        with pytest.raises(LaunchError, match="ended with exit status 3"):
            one.wait()
    one.stop()
    assert processes.of_job(folder.path) == []


def test_a_failure_of_an_earlier_attempt_is_not_that_of_a_later_one(folder):
    report = {"rank": 0, "host": "localhost", "pid": 7, "status": 1, "ended": 1.0, "last": "late"}
    written = f"echo '{json.dumps({**report, 'attempt': 1})}' > {folder.failures}/0.json"
    begin(folder, written, attempt=2).wait()
    assert folder.attempt == 2
    with pytest.raises(LaunchError, match=r"exit status 1 in attempt 2\. Its last lines"):
        begin(folder, written.replace('"attempt": 1', '"attempt": 2'), attempt=2).wait()


def test_a_rank_reports_the_attempt_in_which_it_began(folder):
    folder.reset(3)
    subprocess.run([sys.executable, "-m", "smddp.estimator.rank", str(folder.path), "false"], check=False)
    found = Failure.parse((folder.failures / "0.json").read_text())
    assert found is not None and (found.attempt, found.status) == (3, 1)


LOST = "smddp.PeerLostError: rank 0 left the group"
OWN = "Traceback (most recent call last):\nValueError: x"


@pytest.mark.parametrize(
    ("reports", "cause"),
    [
        # A launcher sends SIGTERM to the neighbours of a rank that failed.
        ([(1, 1, 1.0, LOST), (2, -15, 2.0, "")], 1),
        ([(1, 1, 1.0, LOST), (2, 143, 2.0, "Terminated")], 1),
        ([(1, 1, 3.0, "ValueError"), (2, 1, 1.0, LOST), (3, -15, 2.0, "")], 1),
        ([(1, 1, 1.0, "Connection closed by peer"), (2, -15, 2.0, "")], 1),
        # The cause is the rank that SIGTERM ended first, or a rank that raised an error and was slow to exit.
        ([(1, 1, 2.0, LOST), (2, -15, 1.0, "")], 2),
        ([(1, 1, 2.0, "Connection closed by peer"), (2, -15, 1.0, "")], 2),
        ([(1, 1, 1.0, LOST), (2, -15, 2.0, OWN), (3, -15, 1.5, "")], 2),
        ([(1, -15, 2.0, ""), (2, -9, 3.0, "")], 1),
        ([(1, 1, 1.0, LOST), (2, -9, 2.0, "")], 2),
    ],
)
def test_the_earliest_failure_is_the_reported_cause(reports, cause):
    failures = [Failure(rank, "localhost", 7, status, ended, last) for rank, status, ended, last in reports]
    for given in (failures, failures[::-1]):
        assert launch_error(given, Path()).failure.rank == cause


@pytest.mark.parametrize("distribution", [{}, {"mpi": {"enabled": True, "processes_per_host": 2}}])
def test_a_process_that_a_script_leaves_does_not_delay_the_end(tmp_path, monkeypatch, distribution):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import subprocess, sys; subprocess.Popen(['env', '-i', '/bin/sleep', '30'], start_new_session=True)"
    )
    made = PyTorch("train.py", image_uri="x", instance_type="local", instance_count=1, distribution=distribution)
    begun = time.monotonic()
    made.fit(logs=False)
    assert time.monotonic() - begun < 15
