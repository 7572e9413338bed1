"""Every constructor argument of SageMaker's estimators is followed, reported or refused; none is dropped silently."""

import inspect
import warnings
from pathlib import Path

import pytest
from sdk_arguments import SDK_ARGUMENTS, TRAINER_ARGUMENTS
from smddp.estimator import HuggingFace, PyTorch, TensorFlow, arguments, fitting, framework

CLASSES = {"PyTorch": PyTorch, "TensorFlow": TensorFlow, "HuggingFace": HuggingFace}
REQUIRED = {
    "PyTorch": {"entry_point": "train.py", "framework_version": "2.2.0", "py_version": "py310"},
    "TensorFlow": {"entry_point": "train.py", "framework_version": "2.14", "py_version": "py310"},
    "HuggingFace": {
        "entry_point": "train.py",
        "transformers_version": "4",
        "pytorch_version": "2",
        "py_version": "py310",
    },
}


def followed(kind: str) -> set[str]:
    """Arguments that the signatures name."""
    signatures = (inspect.signature(each).parameters for each in (CLASSES[kind], framework.Framework))
    return {name for parameters in signatures for name, each in parameters.items() if each.kind != each.VAR_KEYWORD}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_argument_is_in_one_class(kind):
    classes = [followed(kind), set(arguments.NO_EFFECT), set(arguments.WARNED), set(arguments.REFUSED)]
    counts = {name: sum(name in each for each in classes) for name in SDK_ARGUMENTS[kind]}
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("name", sorted({name for names in SDK_ARGUMENTS.values() for name in names}))
def test_an_argument_without_an_effect_is_reported(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    kind = next(kind for kind in CLASSES if name in SDK_ARGUMENTS[kind])
    if name in followed(kind):
        return
    given = {"instance_type": "local", **REQUIRED[kind], name: "value"}
    if name in arguments.REFUSED:
        with pytest.raises(ValueError, match=f"{name}: "):
            CLASSES[kind](**given)
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore", ResourceWarning)  # of other tests' objects
        warnings.simplefilter("always", UserWarning)
        made = CLASSES[kind](**given)
    if name in arguments.WARNED:
        (text,) = [str(each.message) for each in seen]
        assert f"{name} has no effect: {arguments.WARNED[name]}" in text and seen[0].filename == __file__
    else:
        assert seen == []
        fitting.announce(made, made.plan(None, {}, "j", None, 7777, "python")[0], print)
        assert f"no effect in a job that runs here: {name}" in capsys.readouterr().out


def test_a_metric_without_a_group_is_a_warning():
    with pytest.warns(UserWarning, match="base_metric: the regular expression finds no number"):
        PyTorch(
            **REQUIRED["PyTorch"],
            instance_type="local",
            metric_definitions=[{"Name": "base_metric", "Regex": "<><><><><><>"}],
        )


def test_none_and_false_count_as_not_given(recwarn):
    off = dict.fromkeys([*arguments.NO_EFFECT, *arguments.WARNED, *arguments.REFUSED], False)
    made = PyTorch(**REQUIRED["PyTorch"], **off, instance_type="local")
    assert made.without_effect == [] and len(recwarn) == 0


def test_an_experiment_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="experiment_config has no effect"):
        PyTorch(**REQUIRED["PyTorch"], instance_type="local").fit(experiment_config={"TrialName": "t"}, dry_run=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tags": ["a"]}, r"tags: invalid value \['a'\]: expected"),
        (
            {"encrypt_inter_container_traffic": True, "environment": {"SMDDP_TRANSPORT": "fabric"}},
            "environment has SMDDP_TRANSPORT=fabric, and only tcp is encrypted",
        ),
        (
            {"encrypt_inter_container_traffic": True, "environment": {"SMDDP_REQUIRE": "efa"}},
            "SMDDP_REQUIRE=efa, and only tcp is encrypted",
        ),
        (
            {"encrypt_inter_container_traffic": True, "environment": {"SMDDP_ENCRYPT": "0"}},
            "SMDDP_ENCRYPT=0, and only tcp is encrypted: expected '1'",
        ),
        ({"input_mode": "Pipe"}, "input_mode is 'Pipe', and channels are folders here"),
        ({"max_run": 0}, "max_run is 0: expected a time limit in seconds"),
        ({"max_run": "60"}, "max_run is '60'"),
        ({"metric_definitions": [{"Name": "loss"}]}, "metric_definitions: "),
        ({"metric_definitions": [{"Name": "loss", "Regex": "loss=("}]}, "Regex of 'loss' is invalid"),
        ({"checkpoint_s3_uri": "s3://bucket/prefix"}, "give a path or file://, such as the folder at which Mountpoint"),
        ({"checkpoint_local_path": "/opt/ml/checkpoints"}, "without checkpoint_s3_uri"),
        ({"checkpoint_s3_uri": "c", "checkpoint_local_path": "c"}, "expected an absolute path"),
        ({"environment": {"N": 4}}, r"environment variable N: invalid value 4 \(int\): expected text, such as '4'"),
        ({"git_config": {"branch": "main"}}, "git_config: 'repo' is missing"),
        ({"git_config": {"repo": "https://h/r", "brunch": "x"}}, "unknown key 'brunch'; did you mean 'branch'"),
        ({"git_config": {"repo": "https://h/r", "2FA_enabled": "yes"}}, "'2FA_enabled' must be bool, got str"),
        ({"git_config": {"repo": "https://user:secret@h/r"}}, r"invalid repo 'https://\*\*\*@h/r'"),
        ({"git_config": {"repo": "ext::sh -c id"}}, "invalid repo"),
        ({"git_config": {"repo": "https://h/r", "branch": "--upload-pack=x"}}, "invalid branch"),
    ],
)
def test_a_value_that_no_job_here_can_follow_is_refused(given, says):
    with pytest.raises(ValueError, match=says):
        PyTorch(**REQUIRED["PyTorch"], instance_type="local", **given)


def test_the_documentation_has_each_argument_in_one_table_row():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "estimator-arguments.md").read_text()
    sections = {
        "## Arguments": {name for names in SDK_ARGUMENTS.values() for name in names},
        "## ModelTrainer": set(TRAINER_ARGUMENTS),
    }
    for title, names in sections.items():
        section = page.partition(title)[2].partition("\n## ")[0]
        cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        found = [name for cell in cells for name in cell.strip("| `").replace("`", "").split(", ")]
        assert names - set(found) == set() and len(found) == len(set(found)), title
