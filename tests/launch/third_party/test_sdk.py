"""Comparison with SageMaker's SDK 2.257.7: dicts that both reject, and hyperparameters of dicts that both accept.

The SDK needs other package versions than its toolkit, hence a separate environment (.venvs/sdk, by `make test-launch`).
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from smddp.estimator import PyTorch, TensorFlow

sys.path.insert(0, str(Path(__file__).parents[2] / "estimator"))
from sdk_arguments import SDK_ARGUMENTS

SDK = Path(__file__).parents[3] / ".venvs" / "sdk" / "bin" / "python"
ON = {"enabled": True}
OFF = {"enabled": False}
TORCH = {"torch_distributed": ON}
MPI8 = {"mpi": {"enabled": True, "processes_per_host": 8}}
CLASSES = {"PyTorch": PyTorch, "TensorFlow": TensorFlow}


def modelparallel(starter: dict, **parameters: object) -> dict:
    return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, **starter}


def case(distribution: object, *, kind: str = "PyTorch", groups: dict | None = None, **more: object) -> dict:
    version = {"PyTorch": ("2.0.1", "py310"), "TensorFlow": ("2.11.0", "py39")}[kind]
    given = {
        "entry_point": "train.py",
        "framework_version": version[0],
        "py_version": version[1],
        "instance_type": "ml.p4d.24xlarge",
        "instance_count": 1,
        "hyperparameters": {"epochs": 3, "name": "x", "rate": 0.5, "flag": True, "nested": {"a": [1, 2]}},
        "distribution": distribution,
        **more,
    }
    return {"class": kind, "estimator": given, "groups": groups or {}}


V1 = {"framework_version": "1.13.1", "py_version": "py39"}
#: Both take these.
TAKEN = {
    "nothing": case(None),
    "an empty dict": case({}),
    "torchrun": case(TORCH),
    "torchrun, two instances": case(TORCH, instance_count=2),
    "torchrun off, mpi on": case({"torch_distributed": OFF, **MPI8}),
    "data parallel": case({"smdistributed": {"dataparallel": ON}}),
    "data parallel with options": case(
        {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": "-x NCCL_DEBUG=INFO"}}}
    ),
    "data parallel off": case({"smdistributed": {"dataparallel": OFF}}),
    "data parallel by torchrun": case({"smdistributed": {"dataparallel": ON}, **TORCH}),
    "pytorchddp": case({"pytorchddp": ON}),
    "pytorchddp with options": case({"pytorchddp": {"enabled": True, "custom_mpi_options": "--NCCL_DEBUG=VERSION"}}),
    "mpi": case({"mpi": ON}),
    "mpi with options": case({"mpi": {"enabled": True, "processes_per_host": 4, "custom_mpi_options": "-x A=1"}}),
    "mpi off": case({"mpi": OFF}),
    "SMP v1": case(modelparallel(MPI8, partitions=2, microbatches=4, pipeline="interleaved", ddp=True), **V1),
    "SMP v1, spread": case(modelparallel(MPI8, partitions=2, placement_strategy="spread"), **V1),
    "SMP v2 by mpi": case(modelparallel(MPI8, hybrid_shard_degree=8)),
    "SMP v2 by torchrun": case(modelparallel(TORCH, hybrid_shard_degree=4, tensor_parallel_degree=2)),
    "SMP v2 by torchrun, offload": case(modelparallel(TORCH, sm_activation_offloading=True)),
    "instance groups": case(
        {**MPI8, "instance_groups": ["train"]},
        groups={"train": "ml.p4d.24xlarge", "other": "ml.m5.xlarge"},
        instance_type=None,
        instance_count=None,
    ),
    "TensorFlow, mpi": case(MPI8, kind="TensorFlow", model_dir=False),
    "TensorFlow, parameter server": case({"parameter_server": ON}, kind="TensorFlow", model_dir=False),
    "TensorFlow, workers mirrored": case({"multi_worker_mirrored_strategy": ON}, kind="TensorFlow", model_dir=False),
}
#: Both reject these, with the same kind of error except for the rules that docs/reference/estimator-arguments.md lists.
REFUSED = {
    "two libraries": case({"smdistributed": {"dataparallel": ON, "modelparallel": ON}}),
    "an unknown library": case({"smdistributed": {"dataparalel": ON}}),
    "a library of another type": case({"smdistributed": ["dataparallel"]}),
    "pytorchddp with smdistributed": case({"pytorchddp": ON, "smdistributed": {"dataparallel": ON}}),
    "no instance type": case({"smdistributed": {"dataparallel": ON}}, instance_type=None, instance_count=1),
    "torchrun of a shell script": case(TORCH, entry_point="train.sh"),
    "Trainium with another strategy": case({"smdistributed": {"dataparallel": ON}}, instance_type="ml.trn1.32xlarge"),
    "a group that is not the estimator's": case(
        {**MPI8, "instance_groups": ["third"]},
        groups={"train": "ml.p4d.24xlarge", "other": "ml.m5.xlarge"},
        instance_type=None,
        instance_count=None,
    ),
    "a wrong pipeline": case(modelparallel(MPI8, partitions=2, pipeline="fast"), **V1),
    "no microbatches": case(modelparallel(MPI8, partitions=2, microbatches=0), **V1),
    "no default_partition": case(modelparallel(MPI8, partitions=2, auto_partition=False), **V1),
    "a placement": case(modelparallel(MPI8, partitions=2, placement_strategy="DDP"), **V1),
    "parameters of no file": case(
        {"smdistributed": {"modelparallel": {"enabled": True, "parameters": "/no/such/file"}}, **MPI8}, **V1
    ),
}
#: We refuse these alone, as that table says.
LET_THROUGH = {
    "an unknown strategy": case({"torch_distribute": ON}),
    "an unknown key": case({"mpi": {"enabled": True, "process_per_host": 8}}),
    "enabled in words": case({"torch_distributed": {"enabled": "true"}}),
    "two strategies": case({**MPI8, **TORCH}),
    "modelparallel by nothing": case(modelparallel({}, partitions=2), **V1),
    "no instances": case(TORCH, instance_count=0),
    "more ranks than GPUs": case({"mpi": {"enabled": True, "processes_per_host": 16}}),
    "another value than the job's": case({"mpi": {"enabled": True, "custom_mpi_options": "--mca pml ucx"}}),
    "a quote without an end": case({"mpi": {"enabled": True, "custom_mpi_options": "-x 'A=1"}}),
    "no stages": case(modelparallel(MPI8, microbatches=4), **V1),
    "ranks that do not divide": case(modelparallel(MPI8, partitions=3), **V1),
}
#: The SDK refuses these alone, as the line under the table says.
TAKEN_HERE = {
    "letters of a placement": case(modelparallel(MPI8, partitions=2, placement_strategy="TPD"), **V1),
    "a new version": case({"smdistributed": {"dataparallel": ON}}, framework_version="2.9.0"),
    "P5": case({"smdistributed": {"dataparallel": ON}}, instance_type="ml.p5.48xlarge"),
    "torchrun on processors": case(TORCH, instance_type="ml.c5.9xlarge"),
}


@pytest.fixture(scope="module")
def sdk(tmp_path_factory) -> dict[str, dict]:
    """Returns the SDK's result for each case, by name."""
    if not SDK.exists():
        pytest.skip("sagemaker is not installed in .venvs/sdk: make test-launch")
    cases = json.dumps({**TAKEN, **REFUSED, **LET_THROUGH, **TAKEN_HERE})
    file = tmp_path_factory.mktemp("sdk") / "did.json"
    side = [SDK, Path(__file__).parent / "sdk_side.py", file]
    done = subprocess.run(side, input=cases, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict] = json.loads(file.read_text())
    return found


def ours(made: dict) -> dict[str, str]:
    given = dict(made["estimator"])
    if made["groups"]:
        groups = {
            name: SimpleNamespace(instance_group_name=name, instance_type=kind) for name, kind in made["groups"].items()
        }
        asked = given["distribution"]["instance_groups"]
        given["instance_groups"] = list(groups.values())
        chosen = [groups.get(name, SimpleNamespace(instance_group_name=name)) for name in asked]
        given["distribution"] = {**given["distribution"], "instance_groups": chosen}
    return CLASSES[made["class"]](**given).hyperparameters()


@pytest.mark.parametrize("name", TAKEN)
def test_hyperparameters_are_the_sdks_key_by_key(sdk, name):
    assert "error" not in sdk[name], sdk[name]
    theirs = {key: json.loads(value) for key, value in sdk[name]["hyperparameters"].items()}
    assert {key: json.loads(value) for key, value in ours(TAKEN[name]).items()} == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_the_sdk_and_smddp_reject_the_same_arguments(sdk, name):
    assert "error" in sdk[name], sdk[name]
    with pytest.raises(ValueError, match="distribution: "):
        ours(REFUSED[name])


@pytest.mark.parametrize("name", LET_THROUGH)
def test_a_rule_that_the_sdk_lets_through(sdk, name):
    assert "hyperparameters" in sdk[name], sdk[name]
    with pytest.raises(ValueError, match="distribution: "):
        ours(LET_THROUGH[name])


@pytest.mark.parametrize("name", TAKEN_HERE)
def test_what_the_sdk_refuses_and_runs_here(sdk, name):
    assert sdk[name].get("error") == "ValueError", sdk[name]
    ours(TAKEN_HERE[name])


@pytest.mark.parametrize("kind", SDK_ARGUMENTS)
def test_the_table_of_arguments_is_the_sdks(sdk, kind):
    """See tests/estimator/test_estimator_arguments.py for the effect of each."""
    assert SDK_ARGUMENTS[kind] == sdk["arguments"][kind]
