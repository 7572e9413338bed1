"""Configuration objects of `ModelTrainer`, with the names and defaults of SageMaker's SDK 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from smddp.text import did_you_mean


class _Config:
    """Base of configurations. An unknown keyword is a TypeError with the nearest known one."""

    def __new__(cls, *_args: Any, **given: Any) -> Any:
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f" (known: {', '.join(known)})"
                raise TypeError(f"{cls.__name__}: unknown argument {name!r}{hint}")
        return super().__new__(cls)


@dataclass
class SourceCode(_Config):
    """A script of `source_dir`, or a shell `command` that runs there; `args` follow the script's hyperparameters."""

    source_dir: str | None = None
    requirements: str | None = None
    entry_script: str | None = None
    command: str | None = None
    args: Sequence[str | int | float] | None = None
    ignore_patterns: Sequence[str] | None = (".env", ".git", "__pycache__", ".DS_Store", ".cache", ".ipynb_checkpoints")


@dataclass
class Compute(_Config):
    """Instance type and number of hosts; without an instance type the job runs on this machine."""

    instance_type: str | None = None
    instance_count: int | None = None
    volume_size_in_gb: int | None = 30
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    instance_groups: Sequence[Any] | None = None
    training_plan_arn: str | None = None
    instance_placement_config: Any = None
    instance_preferences: Any = None
    enable_managed_spot_training: bool | None = None


@dataclass
class Networking(_Config):
    """Encryption between hosts; the other fields have no effect here."""

    security_group_ids: Sequence[str] | None = None
    subnets: Sequence[str] | None = None
    enable_network_isolation: bool | None = None
    enable_inter_container_traffic_encryption: bool | None = None


@dataclass
class StoppingCondition(_Config):
    """Time limits in seconds: of the job, and with its restarts after lost hosts."""

    max_runtime_in_seconds: int | None = None
    max_wait_time_in_seconds: int | None = None
    max_pending_time_in_seconds: int | None = None


@dataclass
class InputData(_Config):
    """A channel: a path, file:// or s3://, or an S3DataSource."""

    channel_name: str = ""
    data_source: Any = None
    content_type: str | None = None


@dataclass
class S3DataSource(_Config):
    """Objects of S3, whole on each host."""

    s3_data_type: str | None = None
    s3_uri: str | None = None
    s3_data_distribution_type: str | None = None
    attribute_names: Sequence[str] | None = None
    instance_group_names: Sequence[str] | None = None
    model_access_config: Any = None
    hub_access_config: Any = None


@dataclass
class OutputDataConfig(_Config):
    """The folder of all jobs (a path or file://), and whether the model is packed ("GZIP" or "NONE")."""

    s3_output_path: str | None = None
    kms_key_id: str | None = None
    compression_type: str | None = None


@dataclass
class CheckpointConfig(_Config):
    """The folder of checkpoints that later jobs find again, and its path for the script."""

    s3_uri: str | None = None
    local_path: str | None = "/opt/ml/checkpoints"


@dataclass
class Tag(_Config):
    """A tag, which the job's summary has."""

    key: str = ""
    value: str = ""


@dataclass
class MetricDefinition(_Config):
    """A name and a regular expression with a group around the number."""

    name: str = ""
    regex: str = ""


@dataclass
class RetryStrategy(_Config):
    """The largest number of restarts after a lost host."""

    maximum_retry_attempts: int | None = None


@dataclass
class SMP(_Config):
    """Parameters of SMP v2; None leaves one out."""

    hybrid_shard_degree: int | None = None
    sm_activation_offloading: bool | None = None
    activation_loading_horizon: int | None = None
    fsdp_cache_flush_warnings: bool | None = None
    allow_empty_shards: bool | None = None
    tensor_parallel_degree: int | None = None
    context_parallel_degree: int | None = None
    expert_parallel_degree: int | None = None
    random_seed: int | None = None


@dataclass
class Torchrun(_Config):
    """torchrun on each host; without a number of processes as many as the instance type has GPUs."""

    process_count_per_node: int | None = None
    smp: SMP | None = None


@dataclass
class MPI(_Config):
    """mpirun with additional options, such as ["-x", "NAME=VALUE"]."""

    process_count_per_node: int | None = None
    mpi_additional_options: Sequence[str] | None = None
