"""torchx engine: torchx's torchrun component on any of its schedulers."""

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

#: Arguments of torchx.components.dist.ddp that the estimator does not set.
_COMPONENT = ("cpu", "gpu", "memMB", "h", "max_retries", "mounts", "rdzv_backend", "debug")
_POLL = 0.3
#: Seconds between status queries to a remote scheduler.
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
        # Schedulers choose the host names; use SageMaker's names as placeholders.
        return [f"algo-{number + 1}" for number in range(nodes)]

    def channel(self, place: str) -> str | None:
        return None

    def ready(self) -> None:
        engines.needed("torchx.runner", "torchx", "torchx")

    def show(self, work: engines.Work) -> str:
        with self._runner() as runner:
            return str(self._request(runner, work))

    def start(self, work: engines.Work, report: Callable[[str], None]) -> _Run:
        runner = self._runner()
        with _own_signals():
            try:
                handle = runner.schedule(self._request(runner, work))
            except (OSError, RuntimeError) as error:
                raise LaunchError(f"torchx's {self._scheduler} rejected the job: {error}", work.folder) from error
        report(f"smddp: torchx {handle}")
        return _Run(runner, handle, work.folder, report, _POLL if self._scheduler.startswith("local") else _ASK)

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
        # torchrun may interleave ranks' lines; smddp.estimator.rank writes whole lines.
        if "tee" in inspect.signature(ddp).parameters:
            given["tee"] = 0
        at = work.command.index("-m")
        app = ddp(
            *(self._escaped(word) for word in work.torchrun_words()[at + 1 :]),
            # torchx writes `-m MODULE ARGUMENTS`. After "--" torchrun leaves the script's arguments alone.
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
    """Restores the SIGINT and SIGTERM handlers that torchx's local schedulers replace."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            with contextlib.suppress(ValueError):  # outside the main thread, where handlers cannot change
                signal.signal(number, handler)


class _Run:
    def __init__(self, runner: Any, handle: str, folder: Path, report: Callable[[str], None], every: float) -> None:
        self._runner, self._handle, self._folder = runner, handle, folder
        self._every, self._asked = every, 0.0
        self._status: Any = None
        self._follower = Follower(folder, report)

    def wait(self) -> None:
        """Waits until the job has ended. Raises LaunchError if it failed, with the rank if the folder is shared."""
        try:
            while not self._ended():
                self._follower.poll()
                time.sleep(_POLL)
        finally:
            # Ends remaining processes of a local job.
            self._runner.close()
        well = self._status is not None and self._status.state.name == "SUCCEEDED"
        self._follower.drain(failed=not well)
        if self._follower.failures:
            raise launch_error(list(self._follower.failures.values()), self._folder)
        if not well:
            raise LaunchError(
                f"torchx {self._handle} is no longer on its scheduler"
                if self._status is None
                else f"torchx {self._handle} ended, and no rank reported a cause:\n{self._status}",
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
