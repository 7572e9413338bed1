"""SM_* variables of a job's ranks, as SageMaker's training toolkit sets them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from smddp.estimator.job import Folder
from smddp.launch.local import count_devices

#: Prefix of hyperparameters for the launcher, which the script does not receive.
_FRAMEWORK = "sagemaker_"
#: Hyperparameters of the service, which neither the script nor SM_FRAMEWORK_PARAMS receives.
_SERVICE = frozenset(
    """sagemaker_program sagemaker_submit_directory sagemaker_enable_cloudwatch_metrics sagemaker_region
    sagemaker_container_log_level sagemaker_job_name default_user_module_name _tuning_objective_metric
    sagemaker_s3_output""".split()
)
_GROUP = "homogeneousCluster"
#: Largest value of a variable in bytes, under Linux's limit of 128 KiB for name and value.
_LONGEST = 127 * 1024
#: Strategies whose hosts are the toolkit's distribution instance groups.
_DISTRIBUTED = (
    "sagemaker_mpi_enabled",
    "sagemaker_parameter_server_enabled",
    "sagemaker_distributed_dataparallel_enabled",
    "sagemaker_pytorch_ddp_enabled",
    "sagemaker_multi_worker_mirrored_strategy_enabled",
    "sagemaker_torch_distributed_enabled",
)


def script_parameters(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters of the script, without those of the launcher and the service."""
    return {
        name: value
        for name, value in hyperparameters.items()
        if not name.startswith(_FRAMEWORK) and name not in _SERVICE and name != "mp_parameters"
    }


def arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of a script: `--name value` in the order of the names."""
    words = []
    for name, value in sorted(script_parameters(hyperparameters).items()):
        if isinstance(value, Mapping):
            value = ",".join(f"{key}={each}" for key, each in sorted(value.items()))
        words += [f"--{name}" if len(name) > 1 else f"-{name}", "" if value is None else str(value)]
    return words


def variables(
    folder: Folder,
    *,
    hosts: list[str],
    instance_type: str,
    job_name: str,
    entry_point: str,
    hyperparameters: Mapping[str, Any],
    inputs: Mapping[str, str],
    interface: str | None,
    log_level: int,
    script_arguments: Sequence[str] = (),
) -> dict[str, str]:
    """Returns the SM_* variables that all ranks share; `of_rank` adds those of a host.

    entry_point: path in the code folder. hyperparameters: the script's and the job's own. script_arguments: further
    words of the script's command line.
    """
    script = script_parameters(hyperparameters)
    own = {name: hyperparameters[name] for name in hyperparameters if name in script or name == "mp_parameters"}
    framework = {
        name: value for name, value in hyperparameters.items() if name.startswith(_FRAMEWORK) and name not in _SERVICE
    }
    # A job here has one group, whatever the name of the group that trains.
    distributed = any(framework.get(name) for name in (*_DISTRIBUTED, "sagemaker_distribution_instance_groups"))
    values: dict[str, Any] = {
        **of_hosts(hosts, instance_type, interface),
        "SM_CURRENT_INSTANCE_TYPE": instance_type,
        "SM_CURRENT_INSTANCE_GROUP": _GROUP,
        "SM_INSTANCE_GROUPS": [_GROUP],
        "SM_DISTRIBUTION_INSTANCE_GROUPS": [_GROUP] if distributed else [],
        "SM_IS_HETERO": False,
        "SM_NETWORK_INTERFACE_NAME": interface or "",
        "SM_HPS": script,
        "SM_USER_ENTRY_POINT": entry_point,
        "SM_MODULE_NAME": entry_point.removesuffix(".py"),
        "SM_MODULE_DIR": str(folder.code),
        "SM_FRAMEWORK_MODULE": "",
        "SM_FRAMEWORK_PARAMS": framework,
        "SM_INPUT_DATA_CONFIG": dict.fromkeys(inputs, _CHANNEL),
        "SM_CHANNELS": sorted(inputs),
        "SM_INPUT_DIR": str(folder.path / "input"),
        "SM_INPUT_CONFIG_DIR": str(folder.path / "input" / "config"),
        "SM_MODEL_DIR": str(folder.model),
        "SM_OUTPUT_DIR": str(folder.output),
        "SM_OUTPUT_DATA_DIR": str(folder.output / "data"),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(folder.output / "intermediate"),
        "SM_LOG_LEVEL": log_level,
        "SM_USER_ARGS": [*arguments(script), *script_arguments],
        "TRAINING_JOB_NAME": job_name,
        **{f"SM_CHANNEL_{name.upper()}": str(folder.channel(name)) for name in inputs},
        **{f"SM_HP_{name.upper()}": value for name, value in own.items()},
    }
    return {name: value if isinstance(value, str) else _text(value) for name, value in values.items()}


#: A channel as the service describes it to a container.
_CHANNEL = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}


def of_hosts(hosts: list[str], instance_type: str, interface: str | None = None) -> dict[str, str]:
    """Returns the variables that name the job's hosts, which some engines know only after the job has started."""
    group = {"instance_group_name": _GROUP, "instance_type": instance_type, "hosts": hosts}
    resources = {
        "hosts": hosts,
        "current_instance_type": instance_type,
        "current_group_name": _GROUP,
        "instance_groups": [group],
        **({"network_interface_name": interface} if interface else {}),
    }
    values = {
        "SM_HOSTS": hosts,
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": hosts,
        "SM_INSTANCE_GROUPS_DICT": {_GROUP: group},
        "SM_RESOURCE_CONFIG": resources,
    }
    return {"SM_MASTER": hosts[0], **{name: _text(value) for name, value in values.items()}}


def of_rank(env: MutableMapping[str, str]) -> None:
    """Adds the variables of a rank's own host to `env`, which has SM_CURRENT_HOST and those of `variables`."""
    env.update(SM_NUM_GPUS=str(count_devices()), SM_NUM_CPUS=str(os.cpu_count()), SM_NUM_NEURONS="0")
    resources = {**json.loads(env["SM_RESOURCE_CONFIG"]), "current_host": env["SM_CURRENT_HOST"]}
    env["SM_RESOURCE_CONFIG"] = _text(resources)
    whole = _text(_training_env(env))
    if len(whole) < _LONGEST:
        env["SM_TRAINING_ENV"] = whole


def _training_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of SM_TRAINING_ENV: the properties of the toolkit's environment in one object."""
    parsed = (
        "hosts current_instance_group_hosts instance_groups instance_groups_dict distribution_instance_groups "
        "is_hetero resource_config input_data_config num_gpus num_cpus num_neurons log_level"
    ).split()
    plain = (
        "current_host current_instance_type current_instance_group network_interface_name user_entry_point module_name "
        "module_dir input_dir input_config_dir model_dir output_dir output_data_dir output_intermediate_dir"
    ).split()
    groups = json.loads(env["SM_DISTRIBUTION_INSTANCE_GROUPS"])
    hosts = json.loads(env["SM_HOSTS"]) if groups else []
    return {
        **{name: json.loads(env[f"SM_{name.upper()}"]) for name in parsed},
        **{name: env[f"SM_{name.upper()}"] for name in plain},
        "additional_framework_parameters": json.loads(env["SM_FRAMEWORK_PARAMS"]),
        "channel_input_dirs": {name: env[f"SM_CHANNEL_{name.upper()}"] for name in json.loads(env["SM_CHANNELS"])},
        "distribution_hosts": hosts,
        "framework_module": env["SM_FRAMEWORK_MODULE"] or None,
        "hyperparameters": json.loads(env["SM_HPS"]),
        "is_master": env["SM_CURRENT_HOST"] == env["SM_MASTER"],
        "is_modelparallel_enabled": bool(env.get("SM_HP_MP_PARAMETERS")),
        "job_name": env["TRAINING_JOB_NAME"],
        "master_hostname": env["SM_MASTER"],
        "topology": [],
    }


def _text(value: Any) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True, separators=(",", ":"))
