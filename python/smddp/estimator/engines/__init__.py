"""Engines: what runs a job in place of ssh, by name. What an engine needs is imported when it is used."""

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

ENGINES = ("slurm", "kubernetes", "torchx")
#: The image_uri of a job without a container image: the Python that calls `fit` runs the script.
NO_IMAGE = "here"


@dataclass(frozen=True)
class Work:
    """A job for an engine, which chooses the hosts."""

    name: str
    #: On this machine, and, but for Kubernetes, at the same path on every host.
    folder: Path
    nodes: int
    ranks_per_node: int
    #: Whether torchrun starts the ranks by the job's distribution.
    torchrun: bool
    #: What each rank runs.
    command: list[str]
    env: dict[str, str]
    python: str
    instance_type: str
    #: GPUs of each node, where the instance type says.
    gpus: int | None
    #: Where ranks of several nodes meet; the engine's choice where it is None.
    port: int | None
    image: str | None
    #: Time limit in seconds; None without one.
    max_run: int | None = None

    def torchrun_command(self, *place: str) -> list[str]:
        """torchrun on one node; place: the options that say which."""
        words = [self.python, "-m", "torch.distributed.run", "--nnodes", str(self.nodes)]
        return [*words, "--nproc_per_node", str(self.ranks_per_node), *place, *COMMAND_FOLLOWS, *self.torchrun_words()]

    def torchrun_words(self) -> list[str]:
        """The command of each rank, escaped for torchrun, which replaces ${local_rank} in words."""
        return [escape_dollars(word) for word in self.command]


class Started(Protocol):
    """A job that an engine runs."""

    def wait(self) -> None:
        """Until it has ended. Raises LaunchError where it failed."""

    def stop(self) -> None:
        """End it everywhere."""


class Engine(Protocol):
    #: Where the job's folder is for its ranks; None where that is the path here.
    folder: Path | None
    #: Which interpreter runs the ranks; None for the one here.
    python: str | None

    def hosts(self, job_name: str, nodes: int) -> list[str]:
        """Their names, or names in their place until the job has begun."""

    def channel(self, place: str) -> str | None:
        """Where ranks find what `inputs` names, if not in the job's folder. Raises ValueError for what they cannot."""

    def ready(self) -> None:
        """Raises ImportError without the engine's package, LaunchError where there is nothing to take a job."""

    def show(self, work: Work) -> str:
        """What `start` submits. Raises ValueError for a job that the engine cannot run."""

    def start(self, work: Work, tell: Callable[[str], None]) -> Started:
        """Submit it. tell: called with each line of the ranks' output. Raises LaunchError where nothing takes it."""


def find(name: str, options: Mapping[str, Any] | None) -> Engine:
    """An engine, with its options. Raises ValueError for an unknown one or options that it does not have."""
    if name not in ENGINES:
        raise ValueError(f"engine: {name!r} is none{did_you_mean(name, ENGINES)} (engines: {', '.join(ENGINES)})")
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
    """A module of an engine's package. Raises ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"engine {engine!r} needs {package}: pip install {package} ({error})") from error


def shown(env: Mapping[str, str], words: Iterable[str]) -> str:
    """A command with its variables, as a shell would take them."""
    return shlex.join([*(f"{name}={value}" for name, value in env.items()), *words])
