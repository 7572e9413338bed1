"""A job's folder, of the shape that training scripts know from /opt/ml, and the SM_* variables that lead to it."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smddp import validation

#: Hyperparameters that are for whoever starts the script, not for the script.
_OURS = "sagemaker_"


@dataclass(frozen=True)
class Folder:
    """Where a job's files are; the same path on every host."""

    path: Path

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def failures(self) -> Path:
        """What each rank that failed says of it."""
        return self.path / "failures"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def channel(self, name: str) -> Path:
        return self.path / "input" / "data" / name

    def make(self) -> None:
        """The folders, all empty."""
        for part in (self.code, self.model, self.output / "data", self.failures, self.logs, self.channel("")):
            part.mkdir(parents=True, exist_ok=True)
        (self.path / "input" / "config").mkdir(exist_ok=True)

    def write(self, name: str, value: object) -> None:
        """One of the files that say what the job is: hyperparameters, resourceconfig, inputdataconfig."""
        (self.path / "input" / "config" / f"{name}.json").write_text(json.dumps(value, indent=1))

    def pack(self) -> None:
        """model.tar.gz and output.tar.gz, of what the script left."""
        for folder, name in ((self.model, "model"), (self.output / "data", "output")):
            with tarfile.open(self.path / f"{name}.tar.gz", "w:gz") as archive:
                for file in sorted(folder.iterdir()):
                    archive.add(file, file.name)


def copy_code(source_dir: str | None, entry_point: str, dependencies: list[str], folder: Folder) -> None:
    """Raises ValueError where the script or its folder is not there."""
    if source_dir is not None:
        if not Path(source_dir).is_dir():
            raise ValueError(f"source_dir: there is no folder {source_dir!r}")
        script = Path(source_dir, entry_point)
    else:
        script = Path(entry_point)
    if not script.is_file():
        raise ValueError(f"entry_point: there is no file {str(script)!r}")
    if source_dir is not None:
        ignored = shutil.ignore_patterns("__pycache__", ".git")
        shutil.copytree(source_dir, folder.code, dirs_exist_ok=True, ignore=ignored)
    else:
        shutil.copy(script, folder.code)
    for each in dependencies:
        if not Path(each).exists():
            raise ValueError(f"dependencies: there is nothing at {each!r}")
        # "." and "x/.." have names only once they are resolved.
        name = Path(each).resolve().name
        if not name:
            raise ValueError(f"dependencies: {each!r} is the root folder: give a folder or a file")
        if Path(each).is_dir():
            shutil.copytree(each, folder.code / name, dirs_exist_ok=True)
        else:
            shutil.copy(each, folder.code)


def channels(inputs: Any) -> dict[str, str]:
    """What `fit(inputs)` names, by channel: one place is the channel "training".

    Raises ValueError for what is no place: a path, file://..., s3://..., or an object that names one of S3's.
    """
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping):
        inputs = {"training": inputs}
    found = {}
    for name, value in inputs.items():
        place = value
        if hasattr(value, "config"):
            place = value.config.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
        if not isinstance(place, (str, os.PathLike)):
            raise ValueError(f"inputs: channel {name!r} is {value!r}: give a path, file://... or s3://...")
        found[validation.path_name(str(name), "inputs: channel")] = validation.line(
            os.fspath(place), f"inputs: channel {name!r}"
        )
    return found


def local_path(place: str) -> Path | None:
    """Where a channel's files are on this machine; None for S3's. Raises ValueError for what is not there."""
    if place.startswith("s3://"):
        return None
    scheme, separator, rest = place.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"inputs: {place!r} is neither a path nor file:// nor s3://")
    path = Path(rest if separator else place).absolute()
    if not path.exists():
        raise ValueError(f"inputs: there is nothing at {str(path)!r}")
    return path


def arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """A script's arguments: `--name value` in the order of the names."""
    words = []
    for name in sorted(hyperparameters):
        if name.startswith(_OURS) or name == "mp_parameters":
            continue
        value = hyperparameters[name]
        if isinstance(value, Mapping):
            value = ",".join(f"{key}={each}" for key, each in sorted(value.items()))
        words += [f"--{name}" if len(name) > 1 else f"-{name}", "" if value is None else str(value)]
    return words


def rank_program(folder: Folder, python: str) -> list[str]:
    """What each rank's command is put behind."""
    return [python, "-m", "smddp.estimator.rank", str(folder.path)]


def python_path(code: Path) -> str:
    before = os.environ.get("PYTHONPATH")
    return f"{code}:{before}" if before else str(code)


def variables(
    folder: Folder,
    *,
    hosts: list[str],
    ranks_per_host: int,
    instance_type: str,
    job_name: str,
    entry_point: str,
    hyperparameters: Mapping[str, Any],
    inputs: Mapping[str, str],
    interface: str | None,
    log_level: int,
) -> dict[str, str]:
    """SM_* of every rank of the job; `hyperparameters` are the script's and the job's own.

    SM_CURRENT_HOST is not among them: `smddprun` and the torchrun of each host know it.
    """
    own = {name: value for name, value in hyperparameters.items() if not name.startswith(_OURS)}
    script = {name: value for name, value in own.items() if name != "mp_parameters"}
    framework = {name: value for name, value in hyperparameters.items() if name.startswith(_OURS)}
    values: dict[str, Any] = {
        **of_hosts(hosts, instance_type),
        "SM_NUM_GPUS": ranks_per_host,
        "SM_NUM_CPUS": os.cpu_count(),
        "SM_CURRENT_INSTANCE_TYPE": instance_type,
        "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster",
        "SM_NETWORK_INTERFACE_NAME": interface or "",
        "SM_HPS": script,
        "SM_USER_ENTRY_POINT": entry_point,
        "SM_MODULE_NAME": entry_point.removesuffix(".py"),
        "SM_MODULE_DIR": str(folder.code),
        "SM_FRAMEWORK_PARAMS": framework,
        "SM_INPUT_DATA_CONFIG": {name: {"TrainingInputMode": "File"} for name in inputs},
        "SM_CHANNELS": sorted(inputs),
        "SM_INPUT_DIR": str(folder.path / "input"),
        "SM_INPUT_CONFIG_DIR": str(folder.path / "input" / "config"),
        "SM_MODEL_DIR": str(folder.model),
        "SM_OUTPUT_DIR": str(folder.output),
        "SM_OUTPUT_DATA_DIR": str(folder.output / "data"),
        "SM_LOG_LEVEL": log_level,
        "SM_USER_ARGS": arguments(script),
        "TRAINING_JOB_NAME": job_name,
        **{f"SM_CHANNEL_{name.upper()}": str(folder.channel(name)) for name in inputs},
        **{f"SM_HP_{name.upper()}": value for name, value in own.items()},
    }
    return {name: value if isinstance(value, str) else _text(value) for name, value in values.items()}


def of_hosts(hosts: list[str], instance_type: str) -> dict[str, str]:
    """Those that name the job's hosts, which some engines learn when the job has begun."""
    group = [{"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": hosts}]
    resources = {"hosts": hosts, "current_instance_type": instance_type, "instance_groups": group}
    values = {"SM_HOSTS": hosts, "SM_CURRENT_INSTANCE_GROUP_HOSTS": hosts, "SM_RESOURCE_CONFIG": resources}
    return {"SM_MASTER": hosts[0], **{name: _text(value) for name, value in values.items()}}


def _text(value: Any) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))
