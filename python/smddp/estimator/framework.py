"""The base of all estimators: their arguments, variables and commands."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smddp import validation
from smddp.estimator import (
    arguments,
    checkpoints,
    encryption,
    fitting,
    inputs,
    job,
    metrics,
    repository,
    rules,
    serving,
    source,
    strategies,
    variables,
)
from smddp.estimator.commands import MASTER_PORT, Command, Host, build, hosts_of, with_groups
from smddp.estimator.restarts import Restarts
from smddp.estimator.training_job import Job


class Framework(serving.ServiceMethods):
    """An estimator: checked arguments, hyperparameters, commands, `fit`."""

    _framework_name = ""

    def __init__(
        self,
        entry_point: str | None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        *,
        framework_version: str | None = None,
        py_version: str | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        instance_type: str | None = None,
        instance_count: int | None = None,
        instance_groups: Sequence[Any] | None = None,
        base_job_name: str | None = None,
        output_path: str | None = None,
        dependencies: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        container_log_level: int = 20,
        git_config: Mapping[str, Any] | None = None,
        checkpoint_s3_uri: str | None = None,
        checkpoint_local_path: str | None = None,
        max_run: int | None = None,
        metric_definitions: Sequence[Mapping[str, str]] | None = None,
        model_uri: str | None = None,
        model_channel_name: str = "model",
        input_mode: str = "File",
        disable_output_compression: bool = False,
        use_spot_instances: bool = False,
        max_wait: int | None = None,
        max_retry_attempts: int | None = None,
        encrypt_inter_container_traffic: bool = False,
        tags: Sequence[Mapping[str, str]] | Mapping[str, str] | None = None,
        processes_per_host: int | None = None,
        **more: Any,
    ) -> None:
        if entry_point is None:
            raise ValueError(f"{type(self).__name__}: entry_point is missing: the script that each rank runs")
        if (framework_version is None or py_version is None) and image_uri is None:
            raise ValueError(
                f"{type(self).__name__}: give framework_version and py_version, or image_uri (as for a job of "
                "SageMaker's; here the Python that calls fit runs the script)"
            )
        self.without_effect = arguments.check(type(self).__name__, more)
        self.entry_point, self.source_dir = validation.line(str(entry_point), "entry_point"), source_dir
        if source_dir is not None or git_config is not None:
            validation.relative_path(self.entry_point, "entry_point")
        if instance_type is not None:
            validation.label(instance_type, "instance_type")
        if image_uri is not None:
            validation.image_name(image_uri)
        arguments.check_max_run(max_run)
        inputs.check_mode(input_mode)
        self.set_checkpoints(checkpoint_s3_uri, checkpoint_local_path)
        self.framework_version, self.py_version, self.image_uri = framework_version, py_version, image_uri
        self.instance_type, self.instance_count, self.instance_groups = instance_type, instance_count, instance_groups
        self.base_job_name, self.output_path = base_job_name, output_path
        self.dependencies = list(dependencies or [])
        self.environment = validation.environment(environment or {})
        self.container_log_level = container_log_level
        self.git_config = None if git_config is None else repository.check(git_config)
        self.max_run = max_run
        self.restarts = Restarts(bool(use_spot_instances), max_retry_attempts, max_wait)
        self.restarts.check(max_run)
        self.encrypt_inter_container_traffic = bool(encrypt_inter_container_traffic)
        if self.encrypt_inter_container_traffic:
            encryption.check(self.environment)
        self.tags = arguments.tags(tags)
        self.set_metrics(metric_definitions)
        self.model_uri, self.model_channel_name = model_uri, model_channel_name
        self.disable_output_compression = disable_output_compression
        self.script_hyperparameters = dict(hyperparameters or {})
        for name in self.script_hyperparameters:
            validation.variable_name(str(name), "hyperparameters")
        self.given = rules.validate(
            distribution,
            instance_type=instance_type,
            instance_count=instance_count,
            framework=self._framework_name,
            framework_version=framework_version,
            py_version=py_version,
            image_uri=image_uri,
            entry_point=self.entry_point,
            instance_groups=instance_groups,
            ranks=processes_per_host,
        )
        self.distribution = dict(self.given.distribution)
        #: Arguments of the script after those of its hyperparameters.
        self.script_arguments: list[str] = []
        #: Names in source_dir that are not copied.
        self.ignore_patterns = source.IGNORED
        self.latest_training_job: Job | None = None

    def set_checkpoints(self, checkpoint_s3_uri: str | None, checkpoint_local_path: str | None = None) -> None:
        """Sets the checkpoints of later jobs. Raises ValueError for a folder that no job here can have."""
        checkpoints.check(checkpoint_s3_uri, checkpoint_local_path)
        self.checkpoint_s3_uri, self.checkpoint_local_path = checkpoint_s3_uri, checkpoint_local_path

    def set_metrics(self, metric_definitions: Sequence[Mapping[str, str]] | None) -> None:
        """Sets the metrics of later jobs. Raises ValueError for an invalid definition."""
        self.metric_definitions = metrics.definitions(metric_definitions)

    def set_attempts(self, max_retry_attempts: int | None) -> None:
        """Sets the number of restarts of later jobs. Raises ValueError for an invalid number."""
        self.restarts = replace(self.restarts, attempts=max_retry_attempts)

    def hyperparameters(self) -> dict[str, str]:
        """Returns the script's and the job's hyperparameters, each value as JSON, as the SDK sends them."""
        whole = {**self.script_hyperparameters, **strategies.hyperparameters(self.given)}
        return {str(name): json.dumps(value) for name, value in whole.items()}

    def commands(
        self,
        hosts: Sequence[str] | None = None,
        *,
        inputs: Any = None,
        job_name: str | None = None,
        interface: str | None = None,
        port: int = MASTER_PORT,
        python: str = sys.executable,
    ) -> list[Command]:
        """Returns what `fit` starts: a command for each host that gets one, with its variables. Writes nothing.

        hosts: "NAME" or "NAME:RANKS"; None is this machine. interface: the network interface between them.
        port: port of torchrun's rendezvous on the first host, for several hosts.
        Raises ValueError where the hosts do not fit the job.
        """
        name = self.job_name(job_name)
        return self.plan(hosts, self.channels(inputs), name, interface, port, python)[2]

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: Any = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
        *,
        hosts: Sequence[str] | None = None,
        dry_run: bool = False,
        interface: str | None = None,
        port: int = MASTER_PORT,
        rsh: str = "ssh",
        python: str = sys.executable,
        processes_per_host: int | None = None,
        engine: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ) -> list[Command] | None:
        """Runs the job: on this machine, on `hosts` ("NAME:RANKS") over `rsh`, or by `engine`, which finds the hosts.

        Its folder, of /opt/ml's layout, is JOB_NAME under `output_path` (a path or file://; else ./smddp-jobs), the
        same path on every host; `model.tar.gz` and `output.tar.gz` are there at the end. Ranks on this machine are as
        many as the instance type has GPUs, or processes_per_host, or "localhost:N".

        inputs: a path, file:// or s3:// (copied by the `aws` program), or a dict with one for each channel.
        wait: return after the job's end; else see `latest_training_job.wait()`. logs: print the ranks' output.
        dry_run: print the commands, start nothing, and return them. interface, port: see `commands`.
        processes_per_host: ranks of each host without a number. engine: "slurm", "kubernetes" or "torchx";
        engine_options: the engine's own, see docs/guides/estimator.md.

        Raises ValueError for missing or unfit inputs, hosts, options or scripts, ImportError without the package of an
        engine; smddp.estimator.LaunchError, a RuntimeError, where the job fails, with the first rank that failed, its
        host, its exit status or signal, and its last lines.
        """
        return fitting.fit(
            self,
            inputs,
            wait,
            logs,
            job_name,
            experiment_config,
            hosts=hosts,
            dry_run=dry_run,
            interface=interface,
            port=port,
            rsh=rsh,
            python=python,
            processes_per_host=processes_per_host,
            engine=engine,
            engine_options=engine_options,
        )

    def channels(self, given: Any) -> dict[str, str]:
        """Returns the channels of `fit(inputs)` and, with model_uri, the one of a model to start from."""
        found = inputs.channels(given)
        if self.model_uri is not None:
            if self.model_channel_name in found:
                raise ValueError(
                    f"inputs: channel {self.model_channel_name!r} is model_uri's: give another model_channel_name"
                )
            found |= inputs.channels({self.model_channel_name: self.model_uri})
        return found

    @property
    def model_data(self) -> str | None:
        """The last job's model.tar.gz as file://; its model folder with disable_output_compression."""
        last = self.latest_training_job
        name = "model" if self.disable_output_compression else "model.tar.gz"
        return None if last is None else f"file://{last.folder / name}"

    def deploy(
        self,
        initial_instance_count: int | None = None,
        instance_type: str | None = None,
        *,
        port: int | None = None,
        server_arguments: Sequence[str] = (),
        **more: Any,
    ) -> serving.Predictor:
        """Serves the last job's model on this machine. See `serving.deploy` for arguments and errors.

        initial_instance_count, instance_type: arguments of the SDK, without an effect. Raises RuntimeError before `fit`
        has ended with a model.
        """
        del initial_instance_count, instance_type
        last = self.latest_training_job
        if last is None or last.status not in ("Completed", "Stopped"):
            state = "no job" if last is None else f"job {last.name} is {last.status}"
            raise RuntimeError(f"deploy: {state}: call fit() first, and wait for its end")
        return serving.deploy(last.folder / "model", port, server_arguments, **more)

    def plan(
        self,
        hosts: Sequence[str] | None,
        places: Mapping[str, str],
        name: str,
        interface: str | None,
        port: int,
        python: str,
        mpirun: bool = True,
    ) -> tuple[job.Folder, list[Host], list[Command], dict[str, str]]:
        """Returns the job's folder, its hosts, their commands, and the variables of all ranks. See `commands`."""
        validation.port(port)
        given, count = with_groups(self.given, self.instance_count)
        there = hosts_of(given, hosts, count)
        folder = job.Folder(self.root() / name)
        env = self.variables(folder, [host.name for host in there], places, name, interface)
        path = os.environ.get("PATH", os.defpath)
        env |= {"PATH": f"{Path(python).parent}:{path}", "PYTHONPATH": source.python_path(folder.code)}
        env = validation.environment({**env, **self.rank_environment(folder)})
        found = build(
            given,
            there,
            lambda mpi4py: self.script(folder, python, mpi4py),
            env,
            interface=interface,
            rank_program=job.rank_program(folder, python),
            port=port,
            python=python,
            mpirun=mpirun,
        )
        return folder, there, found, env

    def variables(
        self, folder: job.Folder, hosts: list[str], places: Mapping[str, str], name: str, interface: str | None
    ) -> dict[str, str]:
        """Returns the SM_* variables that all ranks share, in a job whose folder is `folder`."""
        if interface is not None:
            validation.interface_name(interface)
        return variables.variables(
            folder,
            hosts=hosts,
            instance_type=with_groups(self.given, None)[0].instance_type or "local",
            job_name=name,
            entry_point=self.entry_point_name,
            hyperparameters=self.whole(folder),
            inputs=places,
            interface=interface,
            log_level=self.container_log_level,
            script_arguments=self.script_arguments,
        )

    def rank_environment(self, folder: job.Folder) -> dict[str, str]:
        """Returns the variables of `environment` and of encryption, in a job whose folder is `folder`."""
        secure = encryption.variables(folder) if self.encrypt_inter_container_traffic else {}
        return {**secure, **folder.in_job(self.environment)}

    def whole(self, folder: job.Folder) -> dict[str, Any]:
        """Returns all hyperparameters, with paths of a training container replaced by the job's own."""
        return {key: folder.in_job(json.loads(value)) for key, value in self.hyperparameters().items()}

    def script(self, folder: job.Folder, python: str, mpi4py: bool = False) -> list[str]:
        """Returns the command of a rank: the script and its arguments. mpi4py: see `source.command`."""
        words = [*variables.arguments(self.whole(folder)), *self.script_arguments]
        words = [validation.variable_value(word, "arguments") for word in words]
        return source.command(folder, self.entry_point_name, words, python, mpi4py)

    @property
    def entry_point_name(self) -> str:
        """The script's path in the job's code folder."""
        return self.entry_point if self.source_dir is not None else Path(self.entry_point).name

    def root(self) -> Path:
        """The folder of all jobs. Raises ValueError for an output_path in S3."""
        return inputs.folder_of(self.output_path or "smddp-jobs", "output_path")

    def job_name(self, given: str | None) -> str:
        """Returns the name of a job: `given`, or one with the time. Raises ValueError for an invalid name."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d-%H-%M-%S', time.gmtime(now))}-{int(now % 1 * 1000):03d}"
        base = self.base_job_name or f"{self._framework_name}-training"
        return validation.job_name(f"{base}-{stamp}" if given is None else given)
