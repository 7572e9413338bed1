"""Engines that run a job in place of ssh, by name. An engine's dependencies are imported on first use."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smddp.estimator.commands import COMMAND_FOLLOWS
from smddp.text import did_you_mean
from smddp.validation import escape_dollars

__all__ = ["ENGINES", "NO_IMAGE", "Engine", "Started", "Work", "find", "known", "needed", "shown"]

ENGINES = ("slurm", "kubernetes", "torchx")
#: The image_uri of a job without a container image: the Python that calls `fit` runs the script.
NO_IMAGE = "here"


@dataclass(frozen=True)
class Work:
    """A job for an engine, which chooses the hosts."""

    name: str
    #: Path on this machine; except for Kubernetes, the same path on every host.
    folder: Path
    nodes: int
    ranks_per_node: int
    #: True if the job's distribution starts the ranks by torchrun.
    torchrun: bool
    #: Command of each rank.
    command: list[str]
    env: dict[str, str]
    python: str
    instance_type: str
    #: GPUs of each node, if known from the instance type.
    gpus: int | None
    #: Port of the rendezvous between nodes; None lets the engine choose.
    port: int | None
    image: str | None
    #: Time limit in seconds; None without one.
    max_run: int | None = None

    def torchrun_command(self, *place: str) -> list[str]:
        """Returns the torchrun command of one node. place: the options that select the node."""
        words = [self.python, "-m", "torch.distributed.run", "--nnodes", str(self.nodes)]
        return [*words, "--nproc_per_node", str(self.ranks_per_node), *place, *COMMAND_FOLLOWS, *self.torchrun_words()]

    def torchrun_words(self) -> list[str]:
        """The command of each rank, escaped for torchrun, which replaces ${local_rank} in words."""
        return [escape_dollars(word) for word in self.command]


class Started(Protocol):
    """A job that an engine runs."""

    def wait(self) -> None:
        """Waits until the job has ended. Raises LaunchError if it failed."""

    def stop(self) -> None:
        """Ends the job on all hosts."""


class Engine(Protocol):
    #: Path of the job's folder on the ranks' hosts; None for the same path as here.
    folder: Path | None
    #: Interpreter of the ranks; None for this process's interpreter.
    python: str | None

    def hosts(self, job_name: str, nodes: int) -> list[str]:
        """Returns the hosts' names, or placeholders before the job has started."""

    def channel(self, place: str) -> str | None:
        """Returns an input's path for the ranks; None in the job's folder. Raises ValueError for unsupported inputs."""

    def ready(self) -> None:
        """Raises ImportError without the engine's package, LaunchError without a scheduler."""

    def show(self, work: Work) -> str:
        """Returns the text of the submission. Raises ValueError for a job that the engine cannot run."""

    def start(self, work: Work, report: Callable[[str], None]) -> Started:
        """Submits the job. report: called with each line of the ranks' output. Raises LaunchError if it is rejected."""


def find(name: str, options: Mapping[str, Any] | None) -> Engine:
    """Returns an engine with its options. Raises ValueError for an unknown engine or option."""
    if name not in ENGINES:
        raise ValueError(f"engine: unknown {name!r}{did_you_mean(name, ENGINES)} (engines: {', '.join(ENGINES)})")
    made: Engine = importlib.import_module(f"smddp.estimator.engines.{name}").make(dict(options or {}))
    return made


def known(engine: str, options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises ValueError for an option that is not among `names`."""
    names = sorted(names)
    for name in options:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ValueError(f"engine_options: {engine} has no {name!r}{hint} (options: {', '.join(names)})")


def needed(module: str, package: str, engine: str) -> Any:
    """Imports a module of an engine's package. Raises ImportError with the install command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"engine {engine!r} needs {package}: pip install {package} ({error})") from error


def shown(env: Mapping[str, str], words: Iterable[str]) -> str:
    """Returns a command with its variables in shell syntax."""
    return shlex.join([*(f"{name}={value}" for name, value in env.items()), *words])
