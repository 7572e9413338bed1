"""`ModelTrainer`: calls of public documentation run here, and every keyword has an effect or a message."""

import inspect
import json
import os
import warnings
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks.launching import free_port
from sdk_arguments import TRAINER_ARGUMENTS, TRAINER_CONFIGS
from smddp.estimator import (
    MPI,
    SMP,
    CheckpointConfig,
    Compute,
    InputData,
    LaunchError,
    MetricDefinition,
    ModelTrainer,
    Networking,
    OutputDataConfig,
    RetryStrategy,
    S3DataSource,
    SourceCode,
    StoppingCondition,
    Tag,
    Torchrun,
    configs,
    model_trainer,
)

#: A rank: its number, its arguments and the parameters of SMP, in a file of the model folder.
SCRIPT = r"""
import json, os, pathlib, sys
found = {"argv": sys.argv[1:], "smp": json.loads(os.environ.get("SM_HP_MP_PARAMETERS", "{}"))}
found |= {"size": int(os.environ.get("WORLD_SIZE", 1)), "channels": json.loads(os.environ["SM_CHANNELS"])}
pathlib.Path(os.environ["SM_MODEL_DIR"], os.environ.get("RANK", "0")).write_text(json.dumps(found))
print({"loss": 0.5})
"""
CODE = {"source_dir": "./scripts", "entry_script": "train.py"}
slow = pytest.mark.slow
#: torchrun of two hosts imports torch twice.
SLOW = ("torchrun, two hosts", "torchrun with SMP")

#: Calls of public documentation (SDK 3's pages, SageMaker's guide, Hugging Face's pages) and their ranks of one host.
#: Buckets are folders here.
PUBLISHED = {
    "torchrun, two hosts": (
        lambda: {
            "source_code": SourceCode(**CODE),
            "compute": Compute(instance_type="ml.p3dn.24xlarge", instance_count=2),
            "distributed": Torchrun(process_count_per_node=8),
            "hyperparameters": {"epochs": 1, "train_batch_size": 32, "model_name_or_path": "distilbert-base-uncased"},
        },
        8,
    ),
    "torchrun with SMP": (
        lambda: {
            "source_code": SourceCode(**CODE),
            "compute": Compute(instance_type="ml.p4de.24xlarge", instance_count=2),
            "distributed": Torchrun(process_count_per_node=8, smp=SMP(tensor_parallel_degree=2, hybrid_shard_degree=1)),
        },
        8,
    ),
    "torchrun with limits": (
        lambda: {
            "source_code": SourceCode(requirements="requirements.txt", **CODE),
            "base_job_name": "train-deepseek-distill-llama-8b-sft-batch",
            "compute": Compute(instance_type="ml.g6.12xlarge", instance_count=1, keep_alive_period_in_seconds=0),
            "distributed": Torchrun(),
            "stopping_condition": StoppingCondition(max_runtime_in_seconds=7200),
            "hyperparameters": {"config": "/opt/ml/input/data/config/args.yaml"},
            "output_data_config": OutputDataConfig(s3_output_path="output"),
        },
        4,
    ),
    "spot instances": (
        lambda: {
            "source_code": SourceCode(**CODE),
            "compute": Compute(instance_type="ml.g6.xlarge", instance_count=1, enable_managed_spot_training=True),
            "stopping_condition": StoppingCondition(max_runtime_in_seconds=3600, max_wait_time_in_seconds=7200),
            "checkpoint_config": CheckpointConfig(s3_uri="checkpoints"),
            "hyperparameters": {"max_steps": 50, "learning_rate": 2e-5, "output_dir": "/opt/ml/checkpoints"},
        },
        1,
    ),
    "a command": (
        lambda: {
            "source_code": SourceCode(source_dir="./scripts", command="python train.py --epochs 10"),
            "base_job_name": "my-training-job",
        },
        1,
    ),
    "MPI with options": (
        lambda: {
            "source_code": SourceCode(**CODE),
            "compute": Compute(instance_type="ml.g5.12xlarge", instance_count=1),
            "distributed": MPI(process_count_per_node=2, mpi_additional_options=["-x", "VAR1", "-x", "VAR2=a b"]),
        },
        2,
    ),
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for folder in ("scripts/.git", "data"):
        Path(folder).mkdir(parents=True)
    Path("scripts/train.py").write_text(SCRIPT)
    Path("rsh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    Path("rsh").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_call_has_its_number_of_ranks(name):
    given, ranks = PUBLISHED[name]
    trainer = ModelTrainer(training_image="image", role="role", **given())
    count = trainer.compute.instance_count or 1
    hosts = ["a", "b"] if count == 2 else None
    commands = trainer.train(dry_run=True, hosts=hosts)
    assert len(commands) == count
    words = commands[0].argv
    if "--nproc_per_node" in words:
        assert int(words[words.index("--nproc_per_node") + 1]) == ranks
    elif "-np" in words:
        assert int(words[words.index("-np") + 1]) == ranks


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow if name in SLOW else ()) for name in PUBLISHED])
def test_a_published_call_runs(name, place):
    """With two ranks where torchrun starts them: each takes a second to start."""
    given, ranks = PUBLISHED[name]
    trainer = ModelTrainer(training_image="image", role="role", **given())
    more = {}
    if "torchrun" in name:
        ranks = 2
        several = trainer.compute.instance_count == 2
        more["hosts"] = ["localhost:1", "elsewhere:1"] if several else ["localhost:2"]
        more |= {"rsh": str(place / "rsh"), "port": free_port()}
    trainer.train(wait=True, logs=False, **more)
    job = trainer._latest_training_job
    found = [json.loads((job.folder / "model" / str(rank)).read_text()) for rank in range(ranks)]
    assert [each["size"] for each in found] == [ranks] * ranks
    assert not (job.folder / "code/.git").exists() and job.describe()["TrainingJobStatus"] == "Completed"
    expected = {"hybrid_shard_degree": 1, "tensor_parallel_degree": 2} if "SMP" in name else {}
    assert found[0]["smp"] == expected
    if "command" in name:
        assert found[0]["argv"] == ["--epochs", "10"]
    if "spot" in name:
        assert found[0]["argv"][-1] == str(job.folder / "checkpoints") and Path("checkpoints").is_dir()


def trainer(**given) -> ModelTrainer:
    return ModelTrainer(source_code=SourceCode(**CODE), **given)


def test_every_keyword_of_the_sdk_is_known():
    known = set(inspect.signature(ModelTrainer).parameters) | model_trainer.NO_EFFECT | model_trainer.REFUSED.keys()
    assert set(TRAINER_ARGUMENTS) - known == set()
    for kind, names in TRAINER_CONFIGS.items():
        assert set(names) == {field.name for field in fields(getattr(configs, kind))}, kind


#: A field, a value, and where its effect or its message is found.
FIELDS = {
    "compute": {
        "instance_type": ("local", lambda made: made.instance_type == "local"),
        "instance_count": (1, lambda made: made.instance_count == 1),
        "volume_size_in_gb": (50, "report"),
        "volume_kms_key_id": ("key", "volume_kms_key has no effect"),
        "keep_alive_period_in_seconds": (9, "report"),
        "instance_groups": (
            [SimpleNamespace(instance_group_name="a", instance_type="local", instance_count=1)],
            lambda made: made.instance_groups is not None,
        ),
        "training_plan_arn": ("arn", "report"),
        "instance_placement_config": ({}, None),
        "instance_preferences": ([1], "report"),
        "enable_managed_spot_training": (True, lambda made: made.restarts.spot),
    },
    "networking": {
        "security_group_ids": (["a"], "report"),
        "subnets": (["a"], "report"),
        "enable_network_isolation": (True, "enable_network_isolation has no effect"),
        "enable_inter_container_traffic_encryption": (True, lambda made: made.encrypt_inter_container_traffic),
    },
    "stopping_condition": {
        "max_runtime_in_seconds": (9, lambda made: made.max_run == 9),
        "max_wait_time_in_seconds": (9, "without use_spot_instances"),
        "max_pending_time_in_seconds": (9, "report"),
    },
    "output_data_config": {
        "s3_output_path": ("there", lambda made: made.root().name == "there"),
        "kms_key_id": ("key", "output_kms_key has no effect"),
        "compression_type": ("NONE", lambda made: made.disable_output_compression),
    },
    "checkpoint_config": {
        "s3_uri": ("kept", lambda made: made.checkpoint_s3_uri == "kept"),
        "local_path": ("/opt/ml/checkpoints", None),
    },
}
KINDS = {
    "compute": Compute,
    "networking": Networking,
    "stopping_condition": StoppingCondition,
    "output_data_config": OutputDataConfig,
    "checkpoint_config": CheckpointConfig,
}


def test_every_field_of_a_configuration_has_an_effect_or_a_message():
    for part, kind in KINDS.items():
        assert {field.name for field in fields(kind)} == FIELDS[part].keys()
        for name, (value, expected) in FIELDS[part].items():
            given = {part: kind(**{name: value})}
            with warnings.catch_warnings(record=True) as seen:
                # A collection of garbage in this block may emit a ResourceWarning about another test's object.
                warnings.simplefilter("ignore", ResourceWarning)
                warnings.simplefilter("always", UserWarning)
                try:
                    made = trainer(**given).estimator
                except ValueError as error:
                    assert isinstance(expected, str) and expected in str(error), name
                    continue
            texts = [str(each.message) for each in seen]
            if expected == "report":
                assert f"{part}.{name}" in made.without_effect
            elif isinstance(expected, str):
                assert any(expected in text for text in texts), name
            elif expected is not None:
                assert expected(made) and texts == [], name


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: trainer(computes=Compute()), TypeError, "unknown argument 'computes'; did you mean 'compute'"),
        (lambda: Compute(instance_typ="a"), TypeError, "Compute: unknown argument 'instance_typ'; did you mean"),
        (lambda: Torchrun(process_per_node=1), TypeError, "did you mean 'process_count_per_node'"),
        (lambda: SMP(hybrid_shard_degre=1), TypeError, "did you mean 'hybrid_shard_degree'"),
        (lambda: trainer(compute={"instance_type": "a"}), TypeError, "expected a Compute"),
        (lambda: trainer(compute=Compute(instance_type="ml.g6.12xlage")), ValueError, "nearest known type"),
        (lambda: trainer(distributed="torchrun"), TypeError, "expected Torchrun or MPI"),
        (
            lambda: trainer(distributed=MPI(mpi_additional_options=["-x", 1])),
            ValueError,
            r"mpi_additional_options: expected a list of words, as .*, got \['-x', 1\]",
        ),
        (
            lambda: trainer(checkpoint_config=CheckpointConfig(local_path="/ckpt")),
            ValueError,
            "checkpoint_local_path is given without checkpoint_s3_uri",
        ),
        (
            lambda: trainer().with_checkpoint_config(CheckpointConfig(local_path="/ckpt")),
            ValueError,
            "checkpoint_local_path is given without checkpoint_s3_uri",
        ),
        (lambda: trainer(algorithm_name="a"), ValueError, "has no script here"),
        (lambda: trainer(output_data_config=OutputDataConfig(compression_type="ZIP")), ValueError, "GZIP or NONE"),
        (lambda: trainer(hyperparameters="a.yaml"), ValueError, "not a readable JSON object"),
        (lambda: ModelTrainer(), ValueError, "give one of entry_script and command"),
        (lambda: ModelTrainer.from_recipe("r"), ValueError, "recipes are not run here"),
        (lambda: ModelTrainer.from_jumpstart_config("r"), ValueError, "not fetched here"),
        (
            lambda: trainer(
                compute=Compute(instance_type="ml.g6.12xlarge"), distributed=Torchrun(process_count_per_node=8)
            ),
            ValueError,
            "ml.g6.12xlarge has 4",
        ),
        (
            lambda: ModelTrainer(source_code=SourceCode(command="a"), distributed=Torchrun()),
            ValueError,
            "a command starts its ranks itself",
        ),
        (
            lambda: trainer().train([InputData(channel_name="a", data_source=object())], dry_run=True),
            ValueError,
            "mount the data",
        ),
        (
            lambda: trainer().train(
                [InputData("a", S3DataSource(s3_uri="s3://b/c", s3_data_type="ManifestFile"))], dry_run=True
            ),
            ValueError,
            "S3DataType='ManifestFile'",
        ),
    ],
)
def test_a_wrong_call_is_an_error_before_anything_starts(make, kind, says):
    with pytest.raises(kind, match=says):
        make()


def test_methods_of_the_trainer():
    made = trainer(tags=[Tag(key="team", value="a"), {"Key": "step", "Value": "b"}])
    made.with_metric_definitions([MetricDefinition(name="loss", regex="'loss': ([0-9.]+)")])
    made.with_retry_strategy(RetryStrategy(maximum_retry_attempts=2)).with_checkpoint_config(CheckpointConfig("kept"))
    with pytest.warns(UserWarning, match="nothing is uploaded"):
        made.with_tensorboard_output_config()
    made.with_remote_debug_config(SimpleNamespace())
    assert made.estimator.restarts.attempts == 2
    made.train(logs=False)
    summary = made.latest_training_job.describe()
    assert summary["FinalMetricDataList"][0]["Value"] == 0.5
    assert [each["Key"] for each in summary["Tags"]] == [
        "team",
        "step",
    ]
    assert os.path.isdir("kept")


def test_a_failure_is_an_estimators():
    Path("scripts/train.py").write_text("raise SystemExit(3)")
    with pytest.raises(LaunchError, match="ended with exit status 3"):
        trainer().train(logs=False)
