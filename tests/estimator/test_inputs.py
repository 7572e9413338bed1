"""Every form of `inputs` becomes a folder for each channel."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from smddp.estimator import PyTorch, inputs

#: A stand-in for the `aws` program, with two objects: s3://bucket/set/part.csv and s3://bucket/rows.csv.
AWS = f"""#!{sys.executable}
import pathlib, sys
_, command, place, to = sys.argv[1:]
to = pathlib.Path(to)
if command == "sync" and place == "s3://bucket/set":
    (to / "part.csv").write_text("1")
if command == "cp" and place == "s3://bucket/rows.csv":
    (to / "rows.csv").write_text("1")
elif command == "cp":
    sys.exit("fatal error: key not found")
"""


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aws").write_text(AWS)
    (tmp_path / "bin" / "aws").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "data").mkdir()
    for name in ("rows.csv", "other.csv"):
        (tmp_path / "data" / name).write_text("1")
    (tmp_path / "train.py").write_text("")
    return tmp_path


def estimator(**given) -> PyTorch:
    return PyTorch("train.py", image_uri="x", instance_type="local", **given)


def made(given, place: Path, **more) -> Path:
    estimator(**more).fit(given, logs=False, job_name="j", hosts=["localhost:1"])
    return place / "smddp-jobs" / "j" / "input" / "data"


@pytest.mark.parametrize("form", ["data/rows.csv", "{place}/data/rows.csv", "file://{place}/data/rows.csv"])
def test_a_channel_of_one_file_is_a_folder_with_that_file(place, form):
    data = made({"train": form.format(place=place), "all": "data"}, place)
    assert files(data / "train") == ["rows.csv"] and files(data / "all") == ["other.csv", "rows.csv"]


def test_a_prefix_and_an_object_of_s3_are_folders(place):
    data = made({"train": "s3://bucket/set", "one": "s3://bucket/rows.csv"}, place)
    assert files(data / "train") == ["part.csv"] and files(data / "one") == ["rows.csv"]


def test_a_missing_object_of_s3_is_named(place):
    with pytest.raises(ValueError, match="aws s3 cp s3://bucket/none: fatal error: key not found"):
        made("s3://bucket/none", place)


def test_a_model_to_start_from_is_a_channel(place):
    data = made({"train": "data"}, place, model_uri="data/rows.csv")
    assert files(data / "model") == ["rows.csv"]
    config = json.loads((data.parent / "config" / "inputdataconfig.json").read_text())
    assert sorted(config) == ["model", "train"]
    with pytest.raises(ValueError, match="channel 'train' is model_uri's"):
        estimator(model_uri="data", model_channel_name="train").fit({"train": "data"})


def training_input(**settings) -> SimpleNamespace:
    """The SDK's TrainingInput with its defaults."""
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/set", "S3DataDistributionType": "FullyReplicated"}
    inside = {name: settings.pop(name) for name in list(settings) if name.startswith(("S3", "Attribute"))}
    return SimpleNamespace(config={"DataSource": {"S3DataSource": {**source, **inside}}, **settings})


def test_an_object_of_the_sdks_names_its_place():
    assert inputs.channels({"train": training_input(InputMode="File", ContentType="csv")}) == {
        "train": "s3://bucket/set"
    }


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("S3DataType", "ManifestFile"),
        ("S3DataDistributionType", "ShardedByS3Key"),
        ("AttributeNames", ["a"]),
        ("InputMode", "Pipe"),
        ("CompressionType", "Gzip"),
        ("RecordWrapperType", "RecordIO"),
        ("ShuffleConfig", {"Seed": 1}),
    ],
)
def test_a_setting_that_changes_the_data_is_refused(setting, value):
    with pytest.raises(ValueError, match=f"channel 'train' has {setting}=.*, which is not applied here"):
        inputs.channels({"train": training_input(**{setting: value})})
