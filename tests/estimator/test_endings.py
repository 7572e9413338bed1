"""Folders that a job's results and checkpoints are in, and how jobs end."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from smddp.estimator import LaunchError, PyTorch, TensorFlow, checkpoints, shell

VERSIONS = {"framework_version": "2", "py_version": "py310", "instance_type": "local", "instance_count": 1}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: str, kind=PyTorch, fit=None, **given):
    """Runs a job of one rank. Returns its estimator and folder."""
    Path("train.py").write_text(f"import os, pathlib, sys, time\n{script}")
    made = kind(entry_point="train.py", **{**VERSIONS, **given})
    made.fit(**{"logs": False, **(fit or {})})
    return made, made.latest_training_job.folder


# ---- paths of a training container ----

WRITES = "out = sys.argv[sys.argv.index('--out') + 1]; os.makedirs(out, exist_ok=True); pathlib.Path(out, 'w').touch()"


@pytest.mark.parametrize("model_dir", [None, "/opt/ml/model"])
def test_tensorflows_model_dir_is_the_jobs_own(model_dir, capsys):
    script = WRITES.replace("--out", "--model_dir")
    made, folder = run(script, TensorFlow, {"logs": True}, model_dir=model_dir)
    assert (folder / "model/w").exists() and made.hyperparameters()["model_dir"] == '"/opt/ml/model"'
    assert f"/opt/ml is {folder} in model_dir" in capsys.readouterr().out
    assert not Path("/opt/ml/model/w").exists()


@pytest.mark.parametrize("part", ["model", "model/sub", "output/data", "checkpoints"])
def test_every_path_of_a_container_is_the_jobs_own(part):
    _, folder = run(
        WRITES, hyperparameters={"out": f"/opt/ml/{part}", "nested": {"a": ["/opt/ml/model"]}, "b": "/opt/ml/models"}
    )
    assert (folder / part / "w").exists()
    sent = json.loads((folder / "input/config/hyperparameters.json").read_text())
    assert json.loads(sent["nested"]) == {"a": [f"{folder}/model"]} and sent["b"] == '"/opt/ml/models"'


def test_a_path_in_environment_is_the_jobs_own():
    _, folder = run("pathlib.Path(os.environ['OUT'], 'w').touch()", environment={"OUT": "/opt/ml/model"})
    assert (folder / "model/w").exists()


def test_a_model_that_is_not_compressed_stays_a_folder():
    made, folder = run("pathlib.Path(os.environ['SM_MODEL_DIR'], 'w').touch()", disable_output_compression=True)
    assert made.model_data == f"file://{folder}/model" and not (folder / "model.tar.gz").exists()


@pytest.mark.parametrize("place", ["s3://bucket/a", "hdfs://a/b"])
def test_a_place_that_is_no_folder_is_refused_with_the_remedy(place):
    Path("train.py").touch()
    remedy = "give a path or file://(, such as the folder at which Mountpoint for Amazon S3 has the bucket)?$"
    with pytest.raises(ValueError, match=f"output_path is '{place}': .*{remedy}"):
        PyTorch("train.py", output_path=place, **VERSIONS).fit(dry_run=True)
    with pytest.raises(ValueError, match=f"checkpoint_s3_uri is '{place}': .*{remedy}"):
        PyTorch("train.py", checkpoint_s3_uri=place, **VERSIONS)


# ---- checkpoints ----

STEP = "d = pathlib.Path(sys.argv[2]); n = len(list(d.iterdir())); (d / f'step-{n}').touch()"


def test_a_later_job_finds_the_checkpoints_of_an_earlier_one(place):
    """At checkpoint_local_path itself, which exists while the job runs, and by a hyperparameter."""
    local = place / "ml" / "checkpoints"
    given = {"checkpoint_s3_uri": f"file://{place}/kept", "checkpoint_local_path": str(local)}
    run(STEP, **given, hyperparameters={"dir": str(local)})
    run(STEP, **given, hyperparameters={"dir": "/opt/ml/checkpoints"})
    run(STEP, **given, hyperparameters={"dir": str(local)})
    assert sorted(path.name for path in (place / "kept").iterdir()) == ["step-0", "step-1", "step-2"]
    assert not local.is_symlink() and not local.parent.exists()


def test_the_path_of_checkpoints_is_no_other_jobs(place):
    local = place / "local"
    one = made_checkpoints(place, "one", local)
    with pytest.raises(ValueError, match="belongs to a running job, whose checkpoints are in"):
        made_checkpoints(place, "two", local)
    same = made_checkpoints(place, "one", local)
    one.release()
    assert local.resolve() == place / "one"
    same.release()
    assert not local.is_symlink()
    # The link of a job whose process was killed.
    local.symlink_to(place / "one")
    made_checkpoints(place, "two", local).release()
    local.mkdir()
    with pytest.raises(ValueError, match="exists on this machine and is not the folder of checkpoint_s3_uri"):
        made_checkpoints(place, "two", local)


def made_checkpoints(place: Path, name: str, local: Path) -> checkpoints.Checkpoints:
    from smddp.estimator.job import Folder

    folder = Folder(place / "jobs" / str(time.monotonic_ns()))
    folder.path.mkdir(parents=True)
    made = checkpoints.Checkpoints(str(place / name), str(local), folder)
    made.make(link_here=True)
    return made


def test_a_path_that_cannot_be_made_is_a_warning(place):
    Path("file").touch()
    with pytest.warns(UserWarning, match="cannot be made a link .*pass the path as a hyperparameter"):
        run(
            STEP,
            checkpoint_s3_uri="kept",
            checkpoint_local_path=str(place / "file" / "below"),
            hyperparameters={"dir": "/opt/ml/checkpoints"},
        )
    assert Path("kept/step-0").exists()


def test_checkpoints_in_pods_are_refused():
    Path("train.py").touch()
    made = PyTorch(
        "train.py",
        image_uri="registry/x",
        instance_type="ml.m5.xlarge",
        instance_count=1,
        checkpoint_s3_uri="kept",
    )
    with pytest.raises(ValueError, match="checkpoint_s3_uri: kubernetes has the job's folder in each pod"):
        made.fit(engine="kubernetes", dry_run=True)


# ---- ends ----


def test_max_run_ends_a_job_and_keeps_its_model():
    script = "pathlib.Path(os.environ['SM_MODEL_DIR'], 'w').touch(); time.sleep(600)"
    begun = time.monotonic()
    with pytest.warns(UserWarning, match="was stopped after max_run=2 seconds"):
        made, folder = run(script, max_run=2)
    assert time.monotonic() - begun < 60 and made.latest_training_job.status == "Stopped"
    assert (folder / "model.tar.gz").exists() and not (folder / "output/success").exists()
    assert "max_run=2" in (folder / "output/failure").read_text()


def test_max_run_is_slurms_time_limit(capsys):
    Path("train.py").touch()
    PyTorch("train.py", max_run=100, **VERSIONS).fit(engine="slurm", dry_run=True)
    assert '"time": 2' in capsys.readouterr().out


def test_metrics_are_found_in_the_output():
    script = "print('loss=2.5 lr=1e-3'); print('loss=nan'); print('loss=x'); print('lr=2', file=sys.stderr)"
    found = [{"Name": "loss", "Regex": r"^loss=(\S+)"}, {"Name": "lr", "Regex": "lr=([0-9.e-]+)"}]
    made, folder = run(script, metric_definitions=found)
    metrics = made.latest_training_job.metrics
    assert [each.value for each in metrics if each.name == "lr"] in ([0.001, 2.0], [2.0, 0.001])
    assert [str(each.value) for each in metrics if each.name == "loss"] == ["2.5", "nan"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == [each.name for each in metrics]


def test_a_scripts_own_failure_file_stays():
    script = "pathlib.Path(os.environ['SM_OUTPUT_DIR'], 'failure').write_text('the script says'); sys.exit(3)"
    with pytest.raises(LaunchError, match="ended with exit status 3"):
        run(script, fit={"job_name": "j"})
    assert Path("smddp-jobs/j/output/failure").read_text() == "the script says"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGRTMIN + 6])
def test_a_signal_is_named_and_is_the_exit_status_of_the_shell_command(number, capsys):
    Path("train.py").write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    assert shell.main(["train.py", "--distribution", "{}", "--job-name", "j"]) == 128 + number
    name = number.name if isinstance(number, signal.Signals) else str(number)
    assert f"was ended by signal {name}" in capsys.readouterr().err
    assert f"signal {name}" in Path("smddp-jobs/j/output/failure").read_text()


def test_gpus_and_ranks_are_different_numbers():
    """The variables are the host's, and LOCAL_WORLD_SIZE is the number of ranks."""
    from smddp.launch.local import count_devices

    script = "pathlib.Path(os.environ['SM_MODEL_DIR'], os.environ.get('RANK', '0')).write_text(repr(dict(os.environ)))"
    _, folder = run(
        script,
        fit={"processes_per_host": 2},
        instance_type="ml.p3.16xlarge",
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
    )
    for rank in range(2):
        env = eval((folder / "model" / str(rank)).read_text())
        assert (env["SM_NUM_GPUS"], env["SM_NUM_NEURONS"]) == (str(count_devices()), "0")
        assert env["LOCAL_WORLD_SIZE"] == "2" and env["SM_NUM_CPUS"] == str(os.cpu_count())
        whole = json.loads(env["SM_TRAINING_ENV"])
        assert whole["num_gpus"] == count_devices() and whole["is_master"]


def test_the_summary_has_the_last_metrics_and_the_tags(capsys):
    found = [{"Name": "loss", "Regex": r"loss=(\S+)"}]
    script = "print('loss=2.5'); print('loss=1.5')"
    made, folder = run(script, fit={"logs": True}, metric_definitions=found, tags={"team": "a"})
    summary = json.loads((folder / "job.json").read_text())
    assert summary == made.latest_training_job.describe()
    assert (summary["TrainingJobStatus"], summary["Restarts"]) == ("Completed", 0)
    assert [(each["MetricName"], each["Value"]) for each in summary["FinalMetricDataList"]] == [("loss", 1.5)]
    assert summary["Tags"] == [{"Key": "team", "Value": "a"}]
    assert " s loss=1.5" in capsys.readouterr().out
    with pytest.raises(LaunchError):
        run("sys.exit(3)", fit={"job_name": "failed"})
    failed = json.loads(Path("smddp-jobs/failed/job.json").read_text())
    assert failed["TrainingJobStatus"] == "Failed" and "exit status 3" in failed["FailureReason"]


def test_encryption_is_the_ranks_setting_with_a_token_that_others_cannot_read(capsys):
    script = (
        "token = pathlib.Path(os.environ['SMDDP_JOB_TOKEN_FILE'])\n"
        "found = dict(os.environ, mode=token.stat().st_mode & 0o777, size=len(token.read_text()))\n"
        "pathlib.Path(os.environ['SM_MODEL_DIR'], 'env').write_text(repr(found))"
    )
    _, folder = run(script, fit={"logs": True}, encrypt_inter_container_traffic=True)
    env = eval((folder / "model/env").read_text())
    assert (env["SMDDP_ENCRYPT"], env["SMDDP_TRANSPORT"]) == ("1", "tcp")
    assert env["size"] > 32 and env["mode"] == 0o600
    # The token ends with the job.
    assert env["SMDDP_JOB_TOKEN_FILE"] == str(folder / "job-token") and not (folder / "job-token").exists()
    assert "traffic of smddp between hosts is encrypted" in capsys.readouterr().out
    made = PyTorch("train.py", image_uri="registry/x", instance_type="local", encrypt_inter_container_traffic=True)
    with pytest.raises(ValueError, match="kubernetes would store the job token in the TrainJob"):
        made.fit(engine="kubernetes", dry_run=True)
