"""Preparation of a job's folder: code, channels, configuration files and checkpoints."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from smddp.estimator import checkpoints, encryption, inputs, job, repository, source

if TYPE_CHECKING:
    from smddp.estimator.framework import Framework


def prepare(
    estimator: Framework,
    folder: job.Folder,
    places: Mapping[str, str],
    env: Mapping[str, str],
    elsewhere: Callable[[str], str | None] = lambda place: None,
    there: job.Folder | None = None,
    *,
    link_here: bool = False,
) -> checkpoints.Checkpoints | None:
    """Makes the job's folder.

    elsewhere: returns where ranks find a channel outside of it. there: the folder's path for ranks; None is the
    path here. link_here: see `Checkpoints.make`.
    """
    if folder.path.exists() and any(folder.path.iterdir()):
        # Failure reports of its ranks would be taken for those of this job.
        raise ValueError(f"job_name: there is a job in {folder.path}: give another name, or remove it")
    here = {channel: place for channel, place in places.items() if elsewhere(place) is None}
    local = {channel: inputs.local_path(place) for channel, place in here.items()}
    with ExitStack() as stack:
        script, source_dir, dependencies = estimator.entry_point, estimator.source_dir, estimator.dependencies
        if estimator.git_config is not None:
            cloned = Path(stack.enter_context(tempfile.TemporaryDirectory()), "repository")
            repository.clone(estimator.git_config, cloned)
            script, source_dir, dependencies = repository.source(cloned, script, source_dir, dependencies)
        folder.make()
        source.copy(source_dir, script, dependencies, folder, estimator.root(), estimator.ignore_patterns)
    for channel, path in local.items():
        inputs.place_channel(places[channel], path, folder.channel(channel))
    folder.write("hyperparameters", _sent(estimator, there or folder, env))
    folder.write("inputdataconfig", json.loads(env["SM_INPUT_DATA_CONFIG"]))
    folder.write("resourceconfig", json.loads(env["SM_RESOURCE_CONFIG"]))
    kept = None
    if estimator.checkpoint_s3_uri is not None:
        kept = checkpoints.Checkpoints(estimator.checkpoint_s3_uri, estimator.checkpoint_local_path, folder)
        kept.make(link_here)
    # Last: an error above would leave the token behind.
    if env.get("SMDDP_JOB_TOKEN_FILE") == str(folder.token):
        encryption.write_token(folder)
    return kept


def _sent(estimator: Framework, folder: job.Folder, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the content of hyperparameters.json: every value as JSON, with the SDK's own for a job."""
    service = {
        "sagemaker_program": estimator.entry_point_name,
        "sagemaker_submit_directory": str(folder.code),
        "sagemaker_container_log_level": estimator.container_log_level,
        "sagemaker_job_name": env.get("TRAINING_JOB_NAME", ""),
    }
    return {name: json.dumps(value) for name, value in {**estimator.whole(folder), **service}.items()}
