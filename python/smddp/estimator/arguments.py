"""Arguments of SageMaker's estimators that a job here reports, warns of or refuses, and checks of simple ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from smddp.text import did_you_mean

#: Arguments that describe resources of AWS. `fit` prints the given names.
NO_EFFECT = frozenset(
    """role sagemaker_session volume_size subnets security_group_ids enable_sagemaker_metrics
    disable_profiler keep_alive_period_in_seconds training_repository_access_mode
    training_repository_credentials_provider_arn enable_infra_check enable_remote_debug enable_session_tag_chaining
    code_location training_plan instance_placement_config""".split()
)
#: Arguments that change what a job does. A warning has the reason why nothing changes here.
WARNED = {
    "enable_network_isolation": "the script has the network of its host",
    "volume_kms_key": "files are not encrypted here",
    "output_kms_key": "files are not encrypted here",
    "rules": "rules of SageMaker Debugger do not run here",
    "debugger_hook_config": "SageMaker Debugger does not run here",
    "tensorboard_output_config": "nothing is uploaded; write TensorBoard logs to SM_OUTPUT_DATA_DIR",
    "profiler_config": "SageMaker's profiler does not run here; see docs/guides/monitoring.md",
    "experiment_config": "SageMaker Experiments is not there",
}
#: Arguments that a job here cannot follow.
REFUSED = {
    "container_entry_point": "no container starts here: give entry_point",
    "container_arguments": "no container starts here: give hyperparameters",
    "compiler_config": "SageMaker's Training Compiler is not here: leave it out",
    "training_recipe": "HyperPod's recipes are not run here: give entry_point and distribution",
    "recipe_overrides": "HyperPod's recipes are not run here: give entry_point and distribution",
}


def check(kind: str, given: Mapping[str, Any]) -> list[str]:
    """Returns the names of given arguments without an effect. None and False count as not given.

    Raises ValueError for arguments that a job here cannot follow, TypeError for unknown ones. Warns for those whose
    absence changes the job. kind: the estimator's class, for messages.
    """
    known = NO_EFFECT | WARNED.keys() | REFUSED.keys()
    for name in given:
        if name not in known:
            raise TypeError(f"{kind}: unknown argument {name!r}{did_you_mean(name, known)}")
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in given:
        if name in REFUSED:
            raise ValueError(f"{name}: {REFUSED[name]}")
        if name in WARNED:
            warnings.warn(f"{kind}: {name} has no effect: {WARNED[name]}", stacklevel=4)
    return [name for name in given if name in NO_EFFECT]


def check_max_run(seconds: object) -> None:
    """Raises ValueError for a time limit other than None or a whole number of seconds."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int) or seconds < 1):
        raise ValueError(f"max_run is {seconds!r}: expected a time limit in seconds, 1 or more")


def tags(given: Any) -> list[dict[str, str]]:
    """Returns tags as a list of {"Key": ..., "Value": ...}; a dict has them by key. Raises ValueError."""
    if isinstance(given, Mapping):
        given = [{"Key": key, "Value": value} for key, value in given.items()]
    found = given or []
    if not all(isinstance(each, Mapping) and set(each) == {"Key", "Value"} for each in found):
        raise ValueError(f'tags: invalid value {given!r}: expected [{{"Key": "team", "Value": "a"}}]')
    return [{name: str(each[name]) for name in ("Key", "Value")} for each in found]
