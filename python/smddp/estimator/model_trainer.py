"""`ModelTrainer` of SageMaker's SDK 3 for jobs that run here, on the engines of the estimators."""

from __future__ import annotations

import enum
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from smddp import files
from smddp.estimator import arguments, configs
from smddp.estimator.commands import Command
from smddp.estimator.framework import Framework
from smddp.estimator.source import ignored
from smddp.estimator.training_job import Job
from smddp.text import did_you_mean

#: Arguments without an effect: a report of `train`.
NO_EFFECT = frozenset(
    "training_mode sagemaker_session role input_s3_key_prefix training_image_config local_container_root".split()
)
#: Arguments and constructors that no job here can follow, with the reason.
REFUSED = {
    "algorithm_name": "an algorithm of SageMaker has no script here: give source_code",
    "model_package_config": "no model package is made here: use the model folder of the job",
    "from_recipe": "HyperPod's recipes are not run here: give source_code and distributed",
    "from_jumpstart_config": "JumpStart's models are not fetched here: give source_code",
}


class Mode(enum.Enum):
    """Modes of training; jobs run here in each of them."""

    LOCAL_CONTAINER = "LOCAL_CONTAINER"
    SAGEMAKER_TRAINING_JOB = "SAGEMAKER_TRAINING_JOB"


class _Trainer(Framework):
    """The estimator of a trainer."""

    _framework_name = "pytorch"


class ModelTrainer:
    """Trainer with the interface of `sagemaker.train.ModelTrainer`; `train` runs the job here.

    docs/reference/estimator-arguments.md has every argument. Raises ValueError for a broken rule or an argument that a
    job here cannot follow, TypeError for unknown arguments.
    """

    def __init__(
        self,
        *,
        source_code: Any = None,
        distributed: Any = None,
        compute: Any = None,
        networking: Any = None,
        stopping_condition: Any = None,
        training_image: str | None = None,
        output_data_config: Any = None,
        input_data_config: Sequence[Any] | None = None,
        checkpoint_config: Any = None,
        training_input_mode: str = "File",
        environment: Mapping[str, str] | None = None,
        hyperparameters: Mapping[str, Any] | str | None = None,
        tags: Sequence[Any] | None = None,
        base_job_name: str | None = None,
        **more: Any,
    ) -> None:
        known = [*NO_EFFECT, *REFUSED, *(name for name in ModelTrainer.__init__.__kwdefaults__ or ())]
        for name, value in more.items():
            if name not in known:
                raise TypeError(f"ModelTrainer: unknown argument {name!r}{did_you_mean(name, known)}")
            if name in REFUSED and value is not None:
                raise ValueError(f"{name}: {REFUSED[name]}")
        self.source_code = _checked("source_code", source_code, configs.SourceCode)
        self.distributed = distributed
        self.compute = _checked("compute", compute, configs.Compute)
        self.networking = _checked("networking", networking, configs.Networking)
        self.stopping_condition = _checked("stopping_condition", stopping_condition, configs.StoppingCondition)
        self.output_data_config = _checked("output_data_config", output_data_config, configs.OutputDataConfig)
        self.checkpoint_config = _checked("checkpoint_config", checkpoint_config, configs.CheckpointConfig)
        self.input_data_config = list(input_data_config or [])
        self.hyperparameters = _hyperparameters(hyperparameters)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        given = self._source() | self._resources()
        given |= {
            "image_uri": training_image or "here",
            "base_job_name": base_job_name or "model-trainer",
            "environment": environment,
            "hyperparameters": self.hyperparameters,
            "input_mode": training_input_mode,
            "tags": [
                each if isinstance(each, Mapping) else {"Key": each.key, "Value": each.value} for each in tags or []
            ],
        }
        self.estimator = _Trainer(**given)
        self.estimator.script_arguments = [str(each) for each in self.source_code.args or []]
        self.estimator.ignore_patterns = tuple(self.source_code.ignore_patterns or ())
        self.estimator.without_effect += [name for name, value in more.items() if name in NO_EFFECT and value]
        self.estimator.without_effect += [name for name, value in self._unused().items() if value]

    def train(
        self,
        input_data_config: Sequence[Any] | None = None,
        wait: bool = True,
        logs: bool = True,
        dry_run: bool = False,
        **more: Any,
    ) -> list[Command] | None:
        """Runs the job. Later channels replace those of the constructor with the same name.

        Args:
            input_data_config: List of InputData.
            wait: As in `PyTorch.fit`, with its errors; so are the following arguments.
            logs: False: without the ranks' output.
            dry_run: True prints the commands without starting them.
            **more: hosts, rsh, interface, port, python, job_name, engine and engine_options of `PyTorch.fit`.
        """
        places = _places([*self.input_data_config, *(input_data_config or [])])
        return self.estimator.fit(places, wait=wait, logs=logs, dry_run=dry_run, **more)

    @property
    def latest_training_job(self) -> Job | None:
        """The last job, of which `wait`, `stop`, `describe` and `folder` exist."""
        return self.estimator.latest_training_job

    _latest_training_job = latest_training_job

    def with_checkpoint_config(self, checkpoint_config: Any = None) -> ModelTrainer:
        """Sets the checkpoints of later jobs. Returns this trainer."""
        self.checkpoint_config = _checked("checkpoint_config", checkpoint_config, configs.CheckpointConfig)
        self.estimator.set_checkpoints(**self._checkpoints())
        return self

    def with_metric_definitions(self, metric_definitions: Sequence[Any]) -> ModelTrainer:
        """Sets the metrics of later jobs. Returns this trainer."""
        self.estimator.set_metrics([{"Name": each.name, "Regex": each.regex} for each in metric_definitions])
        return self

    def with_retry_strategy(self, retry_strategy: Any) -> ModelTrainer:
        """Sets the number of restarts after a lost host. Returns this trainer."""
        self.estimator.set_attempts(retry_strategy.maximum_retry_attempts)
        return self

    def with_tensorboard_output_config(self, tensorboard_output_config: Any = None) -> ModelTrainer:
        """Warns: nothing is uploaded. Returns this trainer."""
        arguments.check("ModelTrainer", {"tensorboard_output_config": tensorboard_output_config or True})
        return self

    def _without_effect(self, given: Any = None) -> ModelTrainer:
        """Accepts a configuration of SageMaker's instances, which has no effect here. Returns this trainer."""
        self.estimator.without_effect.append(type(given).__name__)
        return self

    with_infra_check_config = with_session_chaining_config = with_remote_debug_config = _without_effect

    @classmethod
    def from_recipe(cls, *_args: Any, **_given: Any) -> ModelTrainer:
        """Raises ValueError: recipes are not run here."""
        raise ValueError(f"from_recipe: {REFUSED['from_recipe']}")

    @classmethod
    def from_jumpstart_config(cls, *_args: Any, **_given: Any) -> ModelTrainer:
        """Raises ValueError: JumpStart's models are not fetched here."""
        raise ValueError(f"from_jumpstart_config: {REFUSED['from_jumpstart_config']}")

    def _source(self) -> dict[str, Any]:
        code = self.source_code
        if (code.entry_script is None) == (code.command is None):
            raise ValueError("source_code: give one of entry_script and command")
        if code.command is None:
            return {"entry_point": code.entry_script, "source_dir": code.source_dir}
        if self.distributed is not None:
            raise ValueError("source_code: a command starts its ranks itself: give entry_script, or no distributed")
        self._folder = tempfile.TemporaryDirectory()
        script = Path(self._folder.name, "command.sh")
        script.write_text(f"#!/bin/sh\n{code.command}\n")
        folder = Path(code.source_dir) if code.source_dir is not None else None
        if folder is not None and not folder.is_dir():
            raise ValueError(f"source_code: source_dir {code.source_dir!r} does not exist")
        left_out = ignored(code.ignore_patterns or ())
        files = sorted(folder.iterdir()) if folder is not None else []
        return {"entry_point": str(script), "dependencies": [str(each) for each in files if not left_out(each.name)]}

    def _resources(self) -> dict[str, Any]:
        output = self.output_data_config
        if output.compression_type not in (None, "GZIP", "NONE"):
            raise ValueError(f"output_data_config: invalid compression_type {output.compression_type!r}: GZIP or NONE")
        distribution, processes = _distribution(self.distributed)
        return {
            "distribution": distribution,
            "processes_per_host": processes,
            "instance_type": None if self.compute.instance_groups else self.compute.instance_type or "local",
            "instance_count": self.compute.instance_count,
            "instance_groups": self.compute.instance_groups,
            "volume_kms_key": self.compute.volume_kms_key_id,
            "use_spot_instances": bool(self.compute.enable_managed_spot_training),
            "max_run": self.stopping_condition.max_runtime_in_seconds,
            "max_wait": self.stopping_condition.max_wait_time_in_seconds,
            "enable_network_isolation": self.networking.enable_network_isolation,
            "encrypt_inter_container_traffic": bool(self.networking.enable_inter_container_traffic_encryption),
            "output_path": output.s3_output_path,
            "output_kms_key": output.kms_key_id,
            "disable_output_compression": output.compression_type == "NONE",
            **self._checkpoints(),
        }

    def _checkpoints(self) -> dict[str, str | None]:
        kept = self.checkpoint_config
        # The default path without s3_uri is a configuration without checkpoints.
        unset = kept.s3_uri is None and kept.local_path == configs.CheckpointConfig().local_path
        return {"checkpoint_s3_uri": kept.s3_uri, "checkpoint_local_path": None if unset else kept.local_path}

    def _unused(self) -> dict[str, Any]:
        """Returns the fields without an effect that differ from their defaults."""
        compute, networking = self.compute, self.networking
        size = compute.volume_size_in_gb
        return {
            "compute.volume_size_in_gb": size if size != configs.Compute().volume_size_in_gb else None,
            "compute.keep_alive_period_in_seconds": compute.keep_alive_period_in_seconds,
            "compute.training_plan_arn": compute.training_plan_arn,
            "compute.instance_placement_config": compute.instance_placement_config,
            "compute.instance_preferences": compute.instance_preferences,
            "networking.security_group_ids": networking.security_group_ids,
            "networking.subnets": networking.subnets,
            "stopping_condition.max_pending_time_in_seconds": self.stopping_condition.max_pending_time_in_seconds,
            "source_code.requirements": self.source_code.requirements,
        }


def _checked(name: str, value: Any, kind: type) -> Any:
    """Returns a configuration, by default an empty one. Objects of the SDK have the same fields. Raises TypeError."""
    if value is None:
        return kind()
    if type(value).__name__ == kind.__name__:
        return value
    raise TypeError(f"{name} is {value!r}: expected a {kind.__name__}")


def _distribution(distributed: Any) -> tuple[dict[str, Any] | None, int | None]:
    """Returns the `distribution=` dict of a configuration, and its number of ranks on each host."""
    if distributed is None:
        return None, None
    kind, processes = type(distributed).__name__, getattr(distributed, "process_count_per_node", None)
    if kind == "Torchrun":
        found: dict[str, Any] = {"torch_distributed": {"enabled": True}}
        if distributed.smp is not None:
            values = {field.name: getattr(distributed.smp, field.name) for field in fields(configs.SMP)}
            parameters = {name: value for name, value in values.items() if value is not None}
            found["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": parameters}}
        return found, processes
    if kind == "MPI":
        words = list(distributed.mpi_additional_options or [])
        if not all(isinstance(word, str) for word in words):
            raise ValueError(
                f'mpi_additional_options: expected a list of words, as ["-x", "NAME=VALUE"], got {words!r}'
            )
        options = shlex.join(words)
        return {"mpi": {"enabled": True, "processes_per_host": processes, "custom_mpi_options": options}}, processes
    raise TypeError(f"distributed is {distributed!r}: expected Torchrun or MPI; drivers of your own are not run here")


def _hyperparameters(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Returns hyperparameters; those of a JSON file are read. Raises ValueError for another file."""
    if not isinstance(given, str):
        return dict(given or {})
    try:
        return dict(json.loads(files.read_text(given)))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"hyperparameters: {given!r} is not a readable JSON object ({error}): give a dict") from None


def _places(channels: Sequence[Any]) -> dict[str, Any]:
    """Returns the place of each channel. Raises ValueError for data that is not in S3 or a path."""
    found = {}
    for each in channels:
        place = getattr(each.data_source, "s3_data_source", None) or each.data_source
        if hasattr(place, "s3_uri"):
            place = _S3(place)
        elif not isinstance(place, str):
            raise ValueError(
                f"input_data_config: channel {each.channel_name!r} has {place!r}: mount the data, and give its path"
            )
        found[each.channel_name] = place
    return found


class _S3:
    """An S3DataSource in the form of a TrainingInput, whose settings `inputs` checks."""

    def __init__(self, source: Any) -> None:
        names = {"S3Uri": "s3_uri", "S3DataType": "s3_data_type", "S3DataDistributionType": "s3_data_distribution_type"}
        names |= {"AttributeNames": "attribute_names", "HubAccessConfig": "hub_access_config"}
        values = {key: getattr(source, name, None) for key, name in names.items()}
        self.config = {"DataSource": {"S3DataSource": values}}
