"""Description of an estimator's job for an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from smddp import validation
from smddp.estimator import engines, job, machines
from smddp.estimator.commands import MASTER_PORT, efa_variables, exported_variables, with_groups
from smddp.estimator.source import python_path

if TYPE_CHECKING:
    from smddp.estimator.framework import Framework


def work(
    estimator: Framework,
    engine: engines.Engine,
    folder: job.Folder,
    places: Mapping[str, str],
    name: str,
    processes_per_host: int | None,
    interface: str | None,
    port: int,
    python: str,
) -> engines.Work:
    """Raises ValueError for a job that engines do not run, or not this one."""
    given, count = with_groups(estimator.given, estimator.instance_count)
    for strategy in ("parameter_server", "multi_worker_mirrored_strategy"):
        if given.on(strategy):
            raise ValueError(f"{strategy} is not started here: use smdistributed.dataparallel or mpi")
    nodes = count or 1
    if nodes < 1:
        raise ValueError(f"instance_count is {nodes}: give 1 or more")
    each = given.processes_per_host or 1 if processes_per_host is None else processes_per_host
    if each < 1:
        raise ValueError(f"processes_per_host is {each}: give 1 or more")
    there = folder if engine.folder is None else job.Folder(engine.folder)
    hosts = engine.hosts(name, nodes)
    env = estimator.variables(there, hosts, places, name, interface)
    if nodes == 1:
        env["SM_CURRENT_HOST"] = hosts[0]
    for channel, place in places.items():
        path = engine.channel(place)
        if path is not None:
            env[f"SM_CHANNEL_{channel.upper()}"] = path
    env |= {**exported_variables(given), **efa_variables(given)}
    validation.port(port)
    if interface is not None:
        env["NCCL_SOCKET_IFNAME"] = interface
    if engine.folder is None:
        path = os.environ.get("PATH", os.defpath)
        env |= {"PATH": f"{Path(python).parent}:{path}", "PYTHONPATH": python_path(there.code)}
    python = engine.python or python
    return engines.Work(
        name=name,
        folder=folder.path,
        nodes=nodes,
        ranks_per_node=each,
        torchrun=given.on("torch_distributed"),
        command=[*job.rank_program(there, python), *estimator.script(there, python)],
        env=validation.environment({**env, **estimator.rank_environment(there)}),
        python=python,
        instance_type=given.instance_type or "local",
        gpus=machines.GPUS.get(given.instance_type or ""),
        port=None if port == MASTER_PORT else port,
        image=estimator.image_uri,
        max_run=estimator.max_run,
    )
