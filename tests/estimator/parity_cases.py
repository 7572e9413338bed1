"""Twenty job descriptions for the comparison with SageMaker's training toolkit.

`service_files` writes a container's configuration as SageMaker does, for `parity_toolkit.py`, which the real toolkit's
interpreter runs. That side uses neither this package nor its output.
"""

from __future__ import annotations

import json
from pathlib import Path

ON = {"enabled": True}
P4D, CPU = "ml.p4d.24xlarge", "ml.c5.xlarge"
TORCHRUN = {"torch_distributed": ON}
DATA_PARALLEL = {"smdistributed": {"dataparallel": ON}}


def mpi(ranks: int, options: str = "") -> dict:
    return {"mpi": {"enabled": True, "processes_per_host": ranks, "custom_mpi_options": options}}


def case(entry_point: str = "train.py", **given: object) -> dict:
    """class: the estimator. inputs: channels. hosts: their names. Other keys are the estimator's arguments."""
    return {"class": "PyTorch", "entry_point": entry_point, "instance_type": CPU, "hosts": ["localhost"], **given}


TYPES = {
    "epochs": 3,
    "lr": 1e-05,
    "big": 1e22,
    "flag": True,
    "off": False,
    "none": None,
    "empty": "",
    "list": [1, "two", None],
    "dict": {"b": 1, "a": "x y"},
    "a": 7,
    "with-dash": 1,
    "neg": -1,
}
TEXTS = {
    "quotes": 'it\'s "quoted" $HOME `id` \\ back',
    "lines": "a\nb\tc",
    "letters": "Zürich ✓",
    "json": '{"k": [1, 2]}',
    "glob": "*",
    "percent": "100%",
}
#: Names that are abbreviations of torchrun's options.
OPTIONS = dict.fromkeys("log max run start node local master no nnodes".split(), "v")

CASES = {
    "plain": case(),
    "types": case(hyperparameters=TYPES),
    "texts": case(hyperparameters=TEXTS),
    "channels": case(inputs=["train", "validation", "Test-1"]),
    "log level": case(container_log_level=10),
    "path in source_dir": case("sub/dir/train.v2.py", source_dir=True),
    "name with .py inside": case("my.python.py"),
    "shell": case("train.sh", hyperparameters=TYPES),
    "shell in source_dir": case("bin/run.sh", source_dir=True, hyperparameters=TEXTS),
    "program without suffix": case("launch", source_dir=True, hyperparameters={"epochs": 1}),
    "torchrun": case(distribution=TORCHRUN, instance_type=P4D, hyperparameters=TYPES),
    "torchrun, option names": case(distribution=TORCHRUN, instance_type=P4D, hyperparameters=OPTIONS),
    "torchrun, two hosts": case(distribution=TORCHRUN, instance_type=P4D, hosts=["algo-1", "algo-2"]),
    "data parallel": case(distribution=DATA_PARALLEL, instance_type=P4D, hyperparameters={"epochs": 1}),
    "data parallel, two hosts": case(distribution=DATA_PARALLEL, instance_type=P4D, hosts=["algo-1", "algo-2"]),
    "data parallel, shell": case("train.sh", distribution=DATA_PARALLEL, instance_type=P4D),
    "mpi": case(distribution=mpi(4), instance_type=P4D, hyperparameters=TYPES),
    "mpi, shell, options": case("train.sh", distribution=mpi(2, "-x A=1"), instance_type=P4D),
    "TensorFlow": case(**{"class": "TensorFlow"}, model_dir="/opt/ml/model", hyperparameters={"epochs": 2}),
    "service's names": case(hyperparameters={"sagemaker_region": "r", "_tuning_objective_metric": "m", "x": 1}),
}
#: Strategy hyperparameters that the SDK adds; tests/launch/third_party/test_sdk.py holds them against the SDK.
STRATEGIES = {
    "torchrun": {"sagemaker_torch_distributed_enabled": True, "sagemaker_instance_type": P4D},
    "data parallel": {
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_instance_type": P4D,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
    },
    "mpi": {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 4,
        "sagemaker_mpi_custom_mpi_options": "",
    },
    "mpi, shell, options": {
        "sagemaker_mpi_enabled": True,
        "sagemaker_mpi_num_of_processes_per_host": 2,
        "sagemaker_mpi_custom_mpi_options": "-x A=1",
    },
}


def strategy(name: str) -> dict:
    return STRATEGIES.get(name, STRATEGIES.get(name.partition(",")[0], {}))


def service_files(name: str, given: dict, base: Path) -> None:
    """Writes what SageMaker and its SDK put into a container: three configuration files, channels and the code."""
    config, code = base / "input" / "config", base / "code"
    config.mkdir(parents=True)
    sent = {
        **given.get("hyperparameters", {}),
        **({"model_dir": str(base / "model")} if given["class"] == "TensorFlow" else {}),
        **strategy(name),
        "sagemaker_program": given["entry_point"],
        "sagemaker_submit_directory": str(code),
        "sagemaker_container_log_level": given.get("container_log_level", 20),
        "sagemaker_job_name": "j",
    }
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": given["instance_type"],
        "hosts": given["hosts"],
    }
    resources = {
        "current_host": given["hosts"][0],
        "current_instance_type": given["instance_type"],
        "current_group_name": "homogeneousCluster",
        "hosts": given["hosts"],
        "instance_groups": [group],
        "network_interface_name": "eth0",
    }
    channel = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    channels = dict.fromkeys(given.get("inputs", []), channel)
    for file, value in (
        ("hyperparameters", {key: json.dumps(value) for key, value in sent.items()}),
        ("resourceconfig", resources),
        ("inputdataconfig", channels),
    ):
        (config / f"{file}.json").write_text(json.dumps(value))
    for each in channels:
        (base / "input" / "data" / each).mkdir(parents=True)
    write_code(given["entry_point"], code)


def write_code(entry_point: str, code: Path) -> None:
    script = code / entry_point
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("" if entry_point.endswith(".py") else "#!/bin/sh\n")
