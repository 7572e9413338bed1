"""The estimators: the SDK 2.x' classes, whose jobs run here."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smddp import validation
from smddp.estimator import engines, job, rules, running
from smddp.estimator.commands import MASTER_PORT, Command, Host, build, hosts_of
from smddp.estimator.engines.work import work as engine_work
from smddp.estimator.training_job import Job
from smddp.text import did_you_mean

#: Keywords of the SDK that say what a machine of AWS's is to be like, or what is kept where: they change nothing here.
_NO_EFFECT = frozenset(
    """role sagemaker_session volume_size volume_kms_key max_run input_mode output_kms_key tags subnets
    security_group_ids model_uri model_channel_name metric_definitions encrypt_inter_container_traffic
    use_spot_instances max_wait
    checkpoint_s3_uri checkpoint_local_path rules debugger_hook_config tensorboard_output_config
    enable_sagemaker_metrics enable_network_isolation profiler_config disable_profiler max_retry_attempts
    keep_alive_period_in_seconds training_repository_access_mode training_repository_credentials_provider_arn
    enable_infra_check container_entry_point container_arguments disable_output_compression
    enable_remote_debug enable_session_tag_chaining code_location git_config checkpoint_config
    training_plan instance_placement_config retain_s3_uri""".split()
)


class _Framework:
    """What all have: rules held in the constructor, hyperparameters, commands, `fit`."""

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
        compiler_config: object = None,
        **more: Any,
    ) -> None:
        if entry_point is None:
            raise ValueError(f"{type(self).__name__}: entry_point is missing: the script that each rank runs")
        if (framework_version is None or py_version is None) and image_uri is None:
            raise ValueError(
                f"{type(self).__name__}: give framework_version and py_version, or image_uri (as for a job of "
                "SageMaker's; here the Python that calls fit runs the script)"
            )
        if compiler_config is not None:
            raise ValueError("compiler_config: SageMaker's Training Compiler is not here: leave it out")
        for name in more:
            if name not in _NO_EFFECT:
                raise TypeError(f"{type(self).__name__}: unknown argument {name!r}{did_you_mean(name, _NO_EFFECT)}")
        self.entry_point, self.source_dir = validation.line(str(entry_point), "entry_point"), source_dir
        if source_dir is not None:
            validation.relative_path(self.entry_point, "entry_point")
        if instance_type is not None:
            validation.label(instance_type, "instance_type")
        if image_uri is not None:
            validation.image_name(image_uri)
        self.framework_version, self.py_version, self.image_uri = framework_version, py_version, image_uri
        self.instance_type, self.instance_count = instance_type, instance_count
        self.instance_groups = instance_groups
        self.base_job_name, self.output_path = base_job_name, output_path
        self.dependencies = list(dependencies or [])
        self.environment = validation.environment(environment or {})
        self.container_log_level = container_log_level
        self._hyperparameters = dict(hyperparameters or {})
        for name in self._hyperparameters:
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
        )
        self.distribution = dict(self.given.distribution)
        #: Of the script, after those that its hyperparameters make.
        self.script_arguments: list[str] = []
        self.latest_training_job: Job | None = None

    def hyperparameters(self) -> dict[str, str]:
        """The script's and the job's, each value as JSON, as the SDK sends them."""
        whole = {**self._hyperparameters, **self._of_distribution()}
        return {str(name): json.dumps(value) for name, value in whole.items()}

    def _of_distribution(self) -> dict[str, Any]:
        """What the training toolkit reads of the strategies."""
        given = self.given
        found: dict[str, Any] = {}
        if self.distribution.get("instance_groups"):
            found["sagemaker_distribution_instance_groups"] = [
                group.instance_group_name for group in self.distribution["instance_groups"]
            ]
        # pytorchddp is the data parallel library's job by another name.
        parallel = self.distribution.get("pytorchddp")
        if parallel is None:
            parallel = given.of("smdistributed.dataparallel")
        if "parameter_server" in self.distribution:
            found["sagemaker_parameter_server_enabled"] = given.on("parameter_server")
        if "mpi" in self.distribution:
            found["sagemaker_mpi_enabled"] = given.on("mpi")
            if given.of("mpi").get("processes_per_host"):
                found["sagemaker_mpi_num_of_processes_per_host"] = given.of("mpi")["processes_per_host"]
            found["sagemaker_mpi_custom_mpi_options"] = given.of("mpi").get("custom_mpi_options", "")
        if "smdistributed" in self.distribution or "pytorchddp" in self.distribution:
            if given.parameters:
                found["mp_parameters"] = given.parameters
            found["sagemaker_distributed_dataparallel_enabled"] = parallel.get("enabled", False)
            found["sagemaker_instance_type"] = self.instance_type
            if parallel.get("enabled", False):
                found["sagemaker_distributed_dataparallel_custom_mpi_options"] = parallel.get("custom_mpi_options", "")
        if "multi_worker_mirrored_strategy" in self.distribution:
            found["sagemaker_multi_worker_mirrored_strategy_enabled"] = given.on("multi_worker_mirrored_strategy")
        if given.on("torch_distributed"):
            found["sagemaker_torch_distributed_enabled"] = True
            if self.instance_type is not None:
                found["sagemaker_instance_type"] = self.instance_type
            if "smdistributed" not in self.distribution:
                # Then nothing else counts.
                kept = ("sagemaker_torch_distributed_enabled", "sagemaker_instance_type")
                found = {name: value for name, value in found.items() if name in kept}
        return found

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
        """What `fit` would start: one command for each host that gets one, with its variables. Nothing is written.

        hosts: "NAME" or "NAME:RANKS"; this machine where there are none. interface: the network interface between them.
        port: where torchrun's ranks of several hosts meet, on the first of them.
        Raises ValueError where the hosts do not fit the job.
        """
        name = self._name(job_name)
        return self._plan(hosts, job.channels(inputs), name, interface, port, python)[2]

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
        """Run the job: on this machine, on `hosts` ("NAME:RANKS") over `rsh`, or by `engine`, which finds the hosts.

        Its folder, of /opt/ml's shape, is JOB_NAME under `output_path` (a path or file://; else ./smddp-jobs), the same
        path on every host; `model.tar.gz` and `output.tar.gz` are there at the end. Ranks on this machine are as many
        as the instance type has GPUs, or processes_per_host, or "localhost:N".

        inputs: a path, file:// or s3:// (then by the `aws` program), or one for each channel.
        wait: return when it has ended; else see `latest_training_job.wait()`. logs: print the ranks' output.
        dry_run: print what would be started, start nothing, and return it. interface, port: see `commands`.
        processes_per_host: ranks of each host that says nothing. engine: "slurm", "kubernetes" or "torchx";
        engine_options: its own, see docs/estimator.md.

        Raises ValueError for inputs, hosts, options or a script that are not there or do not fit, ImportError without
        the package of an engine; smddp.estimator.LaunchError, a RuntimeError, where the job fails, with the first rank
        that did, its host, how it ended and its last lines.
        """
        name = self._name(job_name)
        places = job.channels(inputs)
        tell = _print if logs not in (False, None, "None") else _quiet
        if engine is not None:
            if hosts is not None or rsh != "ssh":
                raise ValueError(
                    f"hosts, rsh: {engine} finds the hosts itself: give instance_count and processes_per_host"
                )
            runs = engines.find(engine, engine_options)
            folder = job.Folder(self._root() / name)
            work = engine_work(self, runs, folder, places, name, processes_per_host, interface, port, python)
            if dry_run:
                print(self._shown(runs, work, places))
                return None
            runs.show(work)  # its errors, before anything is written
            runs.ready()
            self._make(folder, places, work.env, runs.channel)
            self._begin(name, folder, lambda: runs.start(work, tell), tell, wait, packs=runs.folder is None)
            return None
        if engine_options is not None:
            raise ValueError("engine_options: there is no engine: give engine=, or leave them out")
        if processes_per_host is not None and (hosts or (self.instance_count or 1) == 1):
            hosts = [host if ":" in host else f"{host}:{processes_per_host}" for host in hosts or ["localhost"]]
        running.remote_shell(rsh)
        folder, there, found, env = self._plan(hosts, places, name, interface, port, python)
        if dry_run:
            for command in found:
                print(command)
            return found
        found = self._with_what_is_here(found, there)
        self._make(folder, places, env, lambda place: None)
        ranks = sum(host.slots for host in there)
        tell(f"smddp: job {name}: {ranks} ranks on {', '.join(host.name for host in there)}, in {folder.path}")
        self._begin(
            name,
            folder,
            lambda: running.Run(folder.path, there, found, folder.code, rsh=rsh, python=python, tell=tell),
            tell,
            wait,
        )
        return None

    def _shown(self, engine: engines.Engine, work: engines.Work, places: Mapping[str, str]) -> str:
        if engine.folder is None:
            return engine.show(work)
        # The job's files are part of what is submitted.
        with tempfile.TemporaryDirectory() as folder:
            self._make(job.Folder(Path(folder)), places, work.env, engine.channel)
            return engine.show(replace(work, folder=Path(folder)))

    def _make(
        self,
        folder: job.Folder,
        places: Mapping[str, str],
        env: Mapping[str, str],
        elsewhere: Callable[[str], str | None],
    ) -> None:
        """The job's folder. elsewhere: where ranks find a channel, if not in it."""
        if folder.path.exists() and any(folder.path.iterdir()):
            # How its ranks failed would be taken for how this one's do.
            raise ValueError(f"job_name: there is a job in {folder.path}: give another name, or remove it")
        here = {channel: place for channel, place in places.items() if elsewhere(place) is None}
        local = {channel: job.local_path(place) for channel, place in here.items()}
        folder.make()
        job.copy_code(self.source_dir, self.entry_point, self.dependencies, folder)
        for channel, path in local.items():
            link = folder.channel(channel)
            if path is not None:
                link.symlink_to(path)
            else:
                _sync(places[channel], link)
        folder.write("hyperparameters", self.hyperparameters())
        folder.write("inputdataconfig", json.loads(env["SM_INPUT_DATA_CONFIG"]))
        folder.write("resourceconfig", json.loads(env["SM_RESOURCE_CONFIG"]))

    def _begin(
        self,
        name: str,
        folder: job.Folder,
        make: Callable[[], engines.Started],
        tell: Callable[[str], None],
        wait: bool,
        packs: bool = True,
    ) -> None:
        self.latest_training_job = Job(name, folder, packs)
        self.latest_training_job._start(make, tell)
        if wait:
            self.latest_training_job.wait()

    @property
    def model_data(self) -> str | None:
        """Where the last job's model.tar.gz is, as file://."""
        last = self.latest_training_job
        return None if last is None else f"file://{last.folder / 'model.tar.gz'}"

    def _plan(
        self,
        hosts: Sequence[str] | None,
        places: Mapping[str, str],
        name: str,
        interface: str | None,
        port: int,
        python: str,
    ) -> tuple[job.Folder, list[Host], list[Command], dict[str, str]]:
        validation.port(port)
        there = hosts_of(self.given, hosts, self.instance_count)
        folder = job.Folder(self._root() / name)
        env = self.variables(folder, [host.name for host in there], there[0].slots, places, name, interface)
        path = os.environ.get("PATH", os.defpath)
        env |= {"PATH": f"{Path(python).parent}:{path}", "PYTHONPATH": job.python_path(folder.code), **self.environment}
        env = validation.environment(env)
        found = build(
            self.given,
            there,
            self.script(folder),
            env,
            interface=interface,
            rank_program=job.rank_program(folder, python),
            port=port,
            python=python,
        )
        return folder, there, found, env

    def variables(
        self,
        folder: job.Folder,
        hosts: list[str],
        ranks_per_host: int,
        places: Mapping[str, str],
        name: str,
        interface: str | None,
    ) -> dict[str, str]:
        """SM_* of every rank, in a job whose folder is `folder`."""
        if interface is not None:
            validation.interface_name(interface)
        return job.variables(
            folder,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            instance_type=self.instance_type or "local",
            job_name=name,
            entry_point=self.entry_point,
            hyperparameters=self._whole(),
            inputs=places,
            interface=interface,
            log_level=self.container_log_level,
        )

    def _whole(self) -> dict[str, Any]:
        return {key: json.loads(value) for key, value in self.hyperparameters().items()}

    def script(self, folder: job.Folder) -> list[str]:
        """What each rank's Python runs: the script and its arguments."""
        own = {key: value for key, value in self._whole().items() if key != "mp_parameters"}
        words = [*job.arguments(own), *self.script_arguments]
        return [str(folder.code / self.entry_point_name), *(validation.variable_value(w, "arguments") for w in words)]

    @property
    def entry_point_name(self) -> str:
        """The script's name in the job's code folder."""
        return self.entry_point if self.source_dir is not None else Path(self.entry_point).name

    def _with_what_is_here(self, found: list[Command], there: Sequence[Host]) -> list[Command]:
        """Where there is no mpirun, ranks of one host are started by smddprun, and it is said."""
        if found[0].argv[0] != "mpirun" or shutil.which("mpirun"):
            return found
        if len(there) > 1:
            running.need("mpirun", "which starts ranks on several hosts: install Open MPI, or use torch_distributed")
        print("smddp: no mpirun on this machine: smddprun starts the ranks", file=sys.stderr)
        (command,) = found
        words = command.argv[command.argv.index("smddp.estimator.rank") - 2 :]
        if "mpi4py" in words:
            # Which is mpirun's.
            at = words.index("mpi4py")
            words = [*words[: at - 1], *words[at + 1 :]]
        return [Command(command.host, ["smddprun", "--nproc", str(there[0].slots), *words], command.env)]

    def _root(self) -> Path:
        output = self.output_path or "smddp-jobs"
        if output.startswith("s3://"):
            raise ValueError(f"output_path is {output!r}: jobs that run here write to a path or file://")
        return Path(validation.line(output, "output_path").removeprefix("file://")).absolute()

    def _name(self, given: str | None) -> str:
        return validation.job_name(self._new_name() if given is None else given)

    def _new_name(self) -> str:
        base = self.base_job_name or f"{self._framework_name}-training"
        now = time.time()
        return f"{base}-{time.strftime('%Y-%m-%d-%H-%M-%S', time.gmtime(now))}-{int(now % 1 * 1000):03d}"


class PyTorch(_Framework):
    """As `sagemaker.pytorch.PyTorch`; `fit` runs the job here.

    distribution: see docs/estimator.md, which has every rule. Arguments that describe a machine of AWS's are taken and
    change nothing. Raises ValueError for what breaks a rule, TypeError for arguments that nobody knows.
    """

    _framework_name = "pytorch"

    def __init__(
        self,
        entry_point: str | None = None,
        framework_version: str | None = None,
        py_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        for name in ("training_recipe", "recipe_overrides"):
            if more.pop(name, None) is not None:
                raise ValueError(f"{name}: HyperPod's recipes are not run here: give entry_point and distribution")
        super().__init__(
            entry_point,
            source_dir,
            hyperparameters,
            framework_version=framework_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )


class HuggingFace(_Framework):
    """As `sagemaker.huggingface.HuggingFace`, of PyTorch; `fit` runs the job here. See `PyTorch`."""

    _framework_name = "huggingface"

    def __init__(
        self,
        py_version: str,
        entry_point: str,
        transformers_version: str | None = None,
        tensorflow_version: str | None = None,
        pytorch_version: str | None = None,
        source_dir: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        if image_uri is None and transformers_version is None:
            raise ValueError("HuggingFace: give transformers_version and pytorch_version, or image_uri")
        if image_uri is None and (tensorflow_version is None) == (pytorch_version is None):
            raise ValueError("HuggingFace: give one of pytorch_version and tensorflow_version")
        super().__init__(
            entry_point,
            source_dir,
            hyperparameters,
            framework_version=pytorch_version or tensorflow_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )
        self.transformers_version = transformers_version


class TensorFlow(_Framework):
    """As `sagemaker.tensorflow.TensorFlow`; `fit` runs the job here. See `PyTorch`."""

    _framework_name = "tensorflow"

    def __init__(
        self,
        py_version: str | None = None,
        framework_version: str | None = None,
        model_dir: str | bool | None = None,
        image_uri: str | None = None,
        distribution: Mapping[str, Any] | None = None,
        *,
        entry_point: str | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            entry_point,
            more.pop("source_dir", None),
            more.pop("hyperparameters", None),
            framework_version=framework_version,
            py_version=py_version,
            image_uri=image_uri,
            distribution=distribution,
            **more,
        )
        if model_dir is not False:
            self._hyperparameters["model_dir"] = model_dir or "/opt/ml/model"


def _sync(place: str, to: Path) -> None:
    if shutil.which("aws") is None:
        raise ValueError(f"inputs: {place!r} needs the `aws` program, which is not here: copy it and give the path")
    import subprocess

    done = subprocess.run(["aws", "s3", "sync", place, str(to)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"inputs: aws s3 sync {re.sub(chr(10), ' ', place)}: {done.stderr.strip()[-500:]}")


def _print(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    pass
