"""The start of an estimator's job: on this machine, on hosts over ssh, or by an engine."""

from __future__ import annotations

import functools
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smddp.estimator import archives, arguments, checkpoints, encryption, engines, job, metrics, running
from smddp.estimator.commands import Command, split_exports, with_groups
from smddp.estimator.engines.work import work as engine_work
from smddp.estimator.preparation import prepare
from smddp.estimator.training_job import Job, Start

if TYPE_CHECKING:
    from smddp.estimator.framework import Framework


def fit(
    estimator: Framework,
    inputs: Any,
    wait: bool,
    logs: Any,
    job_name: str | None,
    experiment_config: Mapping[str, str] | None,
    *,
    hosts: Sequence[str] | None,
    dry_run: bool,
    interface: str | None,
    port: int,
    rsh: str,
    python: str,
    processes_per_host: int | None,
    engine: str | None,
    engine_options: Mapping[str, Any] | None,
) -> list[Command] | None:
    """Runs a job as `Framework.fit` describes."""
    name = estimator.job_name(job_name)
    places = estimator.channels(inputs)
    report = _print if logs not in (False, None, "None") else _quiet
    arguments.check("fit", {"experiment_config": experiment_config})
    found = metrics.Metrics(estimator.metric_definitions)
    output = found.watch(report)
    if engine is not None:
        if hosts is not None or rsh != "ssh":
            raise ValueError(f"hosts, rsh: {engine} finds the hosts itself: give instance_count and processes_per_host")
        runs = engines.find(engine, engine_options)
        estimator.restarts.check_engine(engine)
        folder = job.Folder(estimator.root() / name)
        if runs.folder is not None and estimator.encrypt_inter_container_traffic:
            encryption.check_pods(estimator.environment)
        work = engine_work(estimator, runs, folder, places, name, processes_per_host, interface, port, python)
        if runs.folder is not None and estimator.checkpoint_s3_uri is not None:
            raise ValueError(
                f"checkpoint_s3_uri: {engine} has the job's folder in each pod: leave it out, and let the runtime "
                "mount a volume at the path of the checkpoints"
            )
        if dry_run:
            print(_shown(estimator, runs, work, places))
            return None
        runs.show(work)  # raises its errors before anything is written
        runs.ready()
        there = job.Folder(runs.folder) if runs.folder is not None else folder
        kept = prepare(estimator, folder, places, work.env, runs.channel, there)
        announce(estimator, there, report, work.image if engine != "slurm" else None)
        packs = runs.folder is None
        _begin(estimator, name, folder, lambda *_: runs.start(work, output), report, wait, found, kept, packs)
        return None
    if engine_options is not None:
        raise ValueError("engine_options: given without an engine: give engine=, or leave them out")
    if processes_per_host is not None and (
        hosts or (with_groups(estimator.given, estimator.instance_count)[1] or 1) == 1
    ):
        hosts = [host if ":" in host else f"{host}:{processes_per_host}" for host in hosts or ["localhost"]]
    running.remote_shell(rsh)
    folder, on, commands, env = estimator.plan(hosts, places, name, interface, port, python)
    if dry_run:
        for command in commands:
            print(command)
        return commands
    if commands[0].argv[0] == "mpirun" and shutil.which("mpirun") is None:
        commands = _without_mpirun(estimator, hosts, places, name, interface, port, python)
    kept = prepare(estimator, folder, places, env, link_here=all(running.is_here(host.name) for host in on))
    announce(estimator, folder, report)
    ranks = sum(host.slots for host in on)
    report(f"smddp: job {name}: {ranks} ranks on {', '.join(host.name for host in on)}, in {folder.path}")

    # A restart sends the files of the first attempt, without files that the script has written since.
    files = functools.cache(lambda: archives.packed(folder.path))

    def make(attempt: int, cancelled: threading.Event) -> running.Run:
        return running.Run(
            folder.path,
            on,
            commands,
            folder.code,
            rsh=rsh,
            python=python,
            report=output,
            attempt=attempt,
            files=files,
            cancelled=cancelled,
        )

    _begin(estimator, name, folder, make, report, wait, found, kept)
    return None


def announce(estimator: Framework, folder: job.Folder, report: Callable[[str], None], image: str | None = None) -> None:
    """Reports what differs from a job of SageMaker's. image: the image that runs the job, if one does."""
    names = list(estimator.without_effect)
    if image in (None, engines.NO_IMAGE):
        given = {name: getattr(estimator, name) for name in ("framework_version", "py_version", "image_uri")}
        names += [name for name, value in given.items() if value not in (None, engines.NO_IMAGE)]
    if names:
        report(f"smddp: no effect in a job that runs here: {', '.join(names)}")
    if estimator.encrypt_inter_container_traffic:
        report("smddp: traffic of smddp between hosts is encrypted, over tcp; that of nccl, gloo and stores is not")
    texts = {**estimator.script_hyperparameters, **estimator.environment}
    replaced = [str(name) for name, value in texts.items() if folder.in_job(value) != value]
    if replaced:
        report(f"smddp: /opt/ml is {folder.path} in {', '.join(replaced)}")
    if (folder.code / "requirements.txt").is_file():
        report("smddp: requirements.txt is not installed: install it into the Python that runs the script")


def _shown(estimator: Framework, engine: engines.Engine, work: engines.Work, places: Mapping[str, str]) -> str:
    if engine.folder is None:
        return engine.show(work)
    # The job's files are part of what is submitted.
    with tempfile.TemporaryDirectory() as folder:
        prepare(estimator, job.Folder(Path(folder)), places, work.env, engine.channel, job.Folder(engine.folder))
        return engine.show(replace(work, folder=Path(folder)))


def _begin(
    estimator: Framework,
    name: str,
    folder: job.Folder,
    make: Start,
    report: Callable[[str], None],
    wait: bool,
    found: metrics.Metrics,
    kept: checkpoints.Checkpoints | None,
    packs: bool = True,
) -> None:
    started = Job(
        name,
        folder,
        packs=packs,
        packs_model=not estimator.disable_output_compression,
        max_run=estimator.max_run,
        restarts=estimator.restarts,
        metrics=found,
        checkpoints=kept,
        tags=estimator.tags,
    )
    estimator.latest_training_job = started
    started._start(make, report)
    if wait:
        started.wait()


def _without_mpirun(
    estimator: Framework,
    hosts: Sequence[str] | None,
    places: Mapping[str, str],
    name: str,
    interface: str | None,
    port: int,
    python: str,
) -> list[Command]:
    """Returns the commands of a machine without mpirun: smddprun starts the ranks of one host. Reports that."""
    _, there, found, _ = estimator.plan(hosts, places, name, interface, port, python, mpirun=False)
    if len(there) > 1:
        running.need("mpirun", "which starts ranks on several hosts: install Open MPI, or use torch_distributed")
    unused = split_exports(estimator.given)[1]
    more = f", without the custom_mpi_options {shlex.join(unused)}" if unused else ""
    print(f"smddp: no mpirun on this machine: smddprun starts the ranks{more}", file=sys.stderr)
    return found


def _print(line: str) -> None:
    print(line, flush=True)


def _quiet(line: str) -> None:
    pass
