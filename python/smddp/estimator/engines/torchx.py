"""torchx: its own component for torchrun, on any scheduler that it has."""

from __future__ import annotations

import contextlib
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from smddp.estimator import engines
from smddp.estimator.engines.following import Follower
from smddp.estimator.running import LaunchError, launch_error
from smddp.validation import escape_dollars

#: Of torchx.components.dist.ddp, what the estimator does not say itself.
_COMPONENT = ("cpu", "gpu", "memMB", "h", "max_retries", "mounts", "rdzv_backend", "debug")
_LOOK = 0.3
#: Between questions to a scheduler of many hosts.
_ASK = 5.0


def make(options: dict[str, Any]) -> Torchx:
    return Torchx(options)


class Torchx:
    """options: scheduler ("local_cwd"), cfg (the scheduler's own), and the resources of torchx's dist.ddp."""

    folder: Path | None = None
    python: str | None = None

    def __init__(self, options: dict[str, Any]) -> None:
        engines.known("torchx", options, ("scheduler", "cfg", *_COMPONENT))
        self._component = {name: value for name, value in options.items() if name in _COMPONENT}
        self._scheduler = str(options.get("scheduler", "local_cwd"))
        self._cfg = options.get("cfg", {})
        if not isinstance(self._cfg, dict):
            raise ValueError(f"engine_options: cfg is {self._cfg!r}: give a dict of the scheduler's options")

    def hosts(self, job_name: str, nodes: int) -> list[str]:
        # Schedulers name their hosts as they like; these are the names that a job of SageMaker's has.
        return [f"algo-{number + 1}" for number in range(nodes)]

    def channel(self, place: str) -> str | None:
        return None

    def ready(self) -> None:
        engines.needed("torchx.runner", "torchx", "torchx")

    def show(self, work: engines.Work) -> str:
        with self._runner() as runner:
            return str(self._request(runner, work))

    def start(self, work: engines.Work, tell: Callable[[str], None]) -> _Run:
        runner = self._runner()
        with _own_signals():
            try:
                handle = runner.schedule(self._request(runner, work))
            except (OSError, RuntimeError) as error:
                raise LaunchError(f"torchx's {self._scheduler} does not take the job: {error}", work.folder) from error
        tell(f"smddp: torchx {handle}")
        return _Run(runner, handle, work.folder, tell, _LOOK if self._scheduler.startswith("local") else _ASK)

    def _runner(self) -> Any:
        return engines.needed("torchx.runner", "torchx", "torchx").get_runner()

    def _request(self, runner: Any, work: engines.Work) -> Any:
        if self._scheduler not in runner.scheduler_backends():
            raise ValueError(
                f"engine_options: torchx has no scheduler {self._scheduler!r}; "
                f"it has {', '.join(runner.scheduler_backends())}"
            )
        ddp = engines.needed("torchx.components.dist", "torchx", "torchx").ddp
        given = dict(self._component)
        if work.gpus:
            given.setdefault("gpu", work.gpus)
        if work.port is not None:
            given["rdzv_port"] = work.port
        # torchrun would mix parts of ranks' lines; smddp.estimator.rank writes whole ones.
        if "tee" in inspect.signature(ddp).parameters:
            given["tee"] = 0
        at = work.command.index("-m")
        app = ddp(
            *(self._escaped(word) for word in work.torchrun_words()[at + 1 :]),
            # torchx writes `-m MODULE ARGUMENTS`. After "--" torchrun takes no argument of the script for its own.
            m="--",
            image=work.image or str(work.folder),
            name=f"/{work.name}",
            j=f"{work.nodes}x{work.ranks_per_node}",
            env={name: self._escaped(value) for name, value in work.env.items()},
            **given,
        )
        for role in app.roles:
            role.name = "rank"
        return runner.dryrun(app, self._scheduler, self._cfg)

    def _escaped(self, text: str) -> str:
        """torchx replaces ${app_id} and others; its schedulers for Kubernetes leave $(NAME) to Kubernetes."""
        return escape_dollars(escape_dollars(text) if self._scheduler.startswith("kubernetes") else text)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """torchx's local schedulers take SIGINT and SIGTERM for themselves."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with contextlib.suppress(ValueError):  # not the main thread, where nobody can take them
                signal.signal(number, handler)


class _Run:
    def __init__(self, runner: Any, handle: str, folder: Path, tell: Callable[[str], None], every: float) -> None:
        self._runner, self._handle, self._folder = runner, handle, folder
        self._every, self._asked = every, 0.0
        self._status: Any = None
        self._follower = Follower(folder, tell)

    def wait(self) -> None:
        """Until the job has ended. Raises LaunchError where it failed; with the rank, where the folder is shared."""
        try:
            while not self._ended():
                self._follower.look()
                time.sleep(_LOOK)
        finally:
            # Which ends what is left of a local job.
            self._runner.close()
        well = self._status is not None and self._status.state.name == "SUCCEEDED"
        self._follower.last_look(failed=not well)
        if self._follower.failures:
            raise launch_error(list(self._follower.failures.values()), self._folder)
        if not well:
            raise LaunchError(
                f"torchx {self._handle} is not on its scheduler any more"
                if self._status is None
                else f"torchx {self._handle} ended, and no rank says why:\n{self._status}",
                self._folder,
            )

    def stop(self) -> None:
        self._runner.cancel(self._handle)

    def _ended(self) -> bool:
        if time.monotonic() - self._asked < self._every:
            return False
        self._asked = time.monotonic()
        self._status = self._runner.status(self._handle)
        return self._status is None or bool(self._status.is_terminal())
