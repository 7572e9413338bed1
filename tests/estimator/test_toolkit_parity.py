"""Environment, arguments and files of a job beside those of SageMaker's training toolkit, for twenty job descriptions.

parity.json has the toolkit's values; tests/launch/third_party/test_parity.py holds it against the real toolkit.
"""

import json
import os
import shlex
from pathlib import Path

import parity_cases
import pytest
from parity_record import RECORDED
from smddp.estimator import PyTorch, TensorFlow, job, variables
from smddp.estimator.preparation import prepare

#: Values that differ on purpose; docs/reference/estimator-arguments.md explains each.
OWN_VARIABLES = {"SM_MASTER", "TRAINING_JOB_NAME"}
ONLY_IN_CONTAINERS = {"is_smddprun_installed", "is_smddpmprun_installed"}


def made(name: str, place: Path):
    given = dict(parity_cases.CASES[name])
    kind = {"PyTorch": PyTorch, "TensorFlow": TensorFlow}[given.pop("class")]
    hosts, channels = given.pop("hosts"), given.pop("inputs", [])
    code = place / "code"
    parity_cases.write_code(given["entry_point"], code)
    if given.pop("source_dir", False):
        given["source_dir"] = str(code)
    else:
        given["entry_point"] = str(code / given["entry_point"])
    for each in channels:
        (place / each).mkdir()
    estimator = kind(
        image_uri="x", py_version="py310", instance_count=len(hosts), output_path=str(place / "jobs"), **given
    )
    return estimator, hosts, {each: str(place / each) for each in channels}


@pytest.fixture(params=parity_cases.CASES)
def both(request, tmp_path, monkeypatch):
    """The toolkit's record, and a job's environment, command and folder, with BASE for its path."""
    name = request.param
    estimator, hosts, inputs = made(name, tmp_path)
    monkeypatch.setattr(variables, "count_devices", lambda: 8 if estimator.instance_type == parity_cases.P4D else 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    command = estimator.commands(hosts, inputs=inputs, job_name="j", interface="eth0", python="PYTHON")[0]
    folder = job.Folder(tmp_path / "jobs" / "j")
    prepare(estimator, folder, inputs, command.env)
    env = {key: value for key, value in command.env.items() if key.startswith("SM_") or key in OWN_VARIABLES}
    # As the program of each rank does; smddprun has set the host.
    env.setdefault("SM_CURRENT_HOST", hosts[0])
    variables.of_rank(env)
    base = str(folder.path)
    words = command.argv[command.argv.index("smddp.estimator.rank") + 2 :]
    return (
        RECORDED[name],
        {key: value.replace(base, "BASE") for key, value in env.items()},
        [word.replace(f"{base}/code/", "").replace(base, "BASE") for word in words],
        folder,
        (name, tmp_path),
    )


def test_the_record_has_twenty_jobs():
    assert set(RECORDED) == set(parity_cases.CASES) and len(RECORDED) == 20


def test_variables_are_the_toolkits(both):
    theirs, ours, *_ = both
    theirs, ours = dict(theirs["variables"]), dict(ours)
    whole, own = json.loads(theirs.pop("SM_TRAINING_ENV")), json.loads(ours.pop("SM_TRAINING_ENV"))
    assert {name: value for name, value in ours.items() if name not in OWN_VARIABLES} == theirs
    whole["is_modelparallel_enabled"] = bool(whole["is_modelparallel_enabled"])
    assert own == {name: value for name, value in whole.items() if name not in ONLY_IN_CONTAINERS}


def test_the_command_of_a_rank_is_the_toolkits(both):
    theirs, _, words, *_ = both
    expected = [word for word in theirs["command"] if word != "--"]
    if expected[0].endswith(".py"):
        expected.insert(0, "PYTHON")  # torchrun adds it
    if expected[0] == "/bin/sh":
        assert (words[:2], shlex.split(words[2])) == (expected[:2], shlex.split(expected[2]))
        return
    if words[1:3] != ["-m", "mpi4py"] and expected[1:3] == ["-m", "mpi4py"]:
        del expected[1:3]  # not installed here
    assert words == expected


def test_files_are_those_of_a_container(both):
    _, ours, _, folder, (name, place) = both
    service = place / "service"
    parity_cases.service_files(name, parity_cases.CASES[name], service)

    def config(base: Path, file: str) -> dict:
        return json.loads((base / "input" / "config" / file).read_text().replace(str(base), "BASE"))

    assert config(folder.path, "hyperparameters.json") == config(service, "hyperparameters.json")
    assert config(folder.path, "inputdataconfig.json") == config(service, "inputdataconfig.json")
    resources = config(service, "resourceconfig.json")
    # One folder serves all hosts.
    del resources["current_host"]
    assert config(folder.path, "resourceconfig.json") == resources
    for variable, value in ours.items():
        if variable.endswith("_DIR") or variable.startswith("SM_CHANNEL_"):
            assert Path(value.replace("BASE", str(folder.path))).is_dir(), variable
    entry = parity_cases.CASES[name]["entry_point"]
    script = folder.code / ours["SM_USER_ENTRY_POINT"]
    assert script.is_file() and entry.endswith(ours["SM_USER_ENTRY_POINT"])
    assert entry.endswith(".py") or os.access(script, os.X_OK)
