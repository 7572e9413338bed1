"""Slurm engine, through submitit: one torchrun task per node, or one smddprun task per rank."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smddp.estimator import engines
from smddp.estimator.engines import slurm_task
from smddp.estimator.engines.following import Follower
from smddp.estimator.running import LaunchError, launch_error, need
from smddp.validation import lines

#: Default time limit in minutes, as in the SDK.
_DAY = 24 * 60
#: Seconds between squeue queries, which load the controller; the job's files are polled more often.
_ASK = 5.0
_POLL = 0.3
#: Seconds to wait for a cancelled job to end.
_END = 30.0
#: Options that the estimator sets itself, and the argument to use instead.
_OURS = {
    "job_name": "job_name=",
    "nodes": "the estimator's instance_count",
    "ntasks_per_node": "processes_per_host=",
    "tasks_per_node": "processes_per_host=",
    "array_parallelism": "one fit for each job",
}


#: Options of submitit with lines of shell.
_SCRIPTS = ("setup", "teardown")


def make(options: dict[str, Any]) -> Slurm:
    return Slurm(options)


class Slurm:
    """options: submitit's for Slurm: partition, time (in minutes), account, gpus_per_node, additional_parameters"""

    folder: Path | None = None
    python: str | None = None

    def __init__(self, options: dict[str, Any]) -> None:
        for name, instead in _OURS.items():
            if name in options:
                raise ValueError(f"engine_options: slurm has no {name!r}: give {instead}")
        # A line break in a value would start another line of the batch script.
        for name, value in options.items():
            if name not in _SCRIPTS:
                lines(value, f"engine_options: {name}")
        self._options = options

    def hosts(self, job_name: str, nodes: int) -> list[str]:
        # Placeholders: each task inserts the real names.
        return [f"node-{number}" for number in range(nodes)]

    def channel(self, place: str) -> str | None:
        return None

    def parameters(self, work: engines.Work) -> dict[str, Any]:
        """Returns submitit's parameters."""
        found: dict[str, Any] = {"job_name": work.name, "nodes": work.nodes, "time": _minutes(work.max_run)}
        found["ntasks_per_node"] = 1 if work.torchrun else work.ranks_per_node
        if work.torchrun:
            # Otherwise all ranks of a node share one CPU.
            found["cpus_per_task"] = work.ranks_per_node
        if work.gpus:
            found["gpus_per_node"] = work.gpus
        found |= {name: value for name, value in self._options.items() if value is not None}
        # One failed task ends the job; each task has reported its failure before.
        words = ["--kill-on-bad-exit=1"]
        if found.get("cpus_per_task"):
            # Slurm 22.05 and later do not pass sbatch's value to srun.
            words.append(f"--cpus-per-task={found['cpus_per_task']}")
        return {**found, "srun_args": [*words, *self._options.get("srun_args", [])]}

    def command(self, work: engines.Work) -> list[str]:
        """Returns the command of each task, with placeholders for task-specific values."""
        if not work.torchrun:
            return ["smddprun", *work.command]
        if work.nodes == 1:
            return work.torchrun_command("--standalone")
        port = slurm_task.PORT if work.port is None else str(work.port)
        where = ["--master_addr", slurm_task.FIRST_HOST, "--master_port", port]
        return work.torchrun_command(*where, "--node_rank", slurm_task.NODE)

    def show(self, work: engines.Work) -> str:
        parameters = json.dumps(self.parameters(work), indent=1)
        return f"{parameters}\n{engines.shown(work.env, self.command(work))}"

    def ready(self) -> None:
        engines.needed("submitit", "submitit", "slurm")
        need("sbatch", "so Slurm is unavailable: start the job on a host of the cluster")

    def start(self, work: engines.Work, report: Callable[[str], None]) -> _Run:
        submitit = engines.needed("submitit", "submitit", "slurm")
        executor = submitit.SlurmExecutor(folder=work.folder / "submitit", python=shlex.quote(work.python))
        executor.update_parameters(**self.parameters(work))
        tasks = work.nodes * (1 if work.torchrun else work.ranks_per_node)
        try:
            job = executor.submit(slurm_task.run, self.command(work), work.env, str(work.folder), work.instance_type)
        except Exception as error:
            # submitit's FailedJobError, with sbatch's output.
            raise LaunchError(f"Slurm rejected the job: {error}", work.folder) from error
        report(f"smddp: Slurm job {job.job_id}")
        return _Run(job, work.folder, tasks, report)


def _minutes(max_run: int | None) -> int:
    return _DAY if max_run is None else -(-max_run // 60)


class _Run:
    def __init__(self, job: Any, folder: Path, tasks: int, report: Callable[[str], None]) -> None:
        self._job, self._folder, self._tasks, self._report = job, folder, tasks, report
        self._follower = Follower(folder, report)
        self._asked = 0.0
        self._state = ""

    def wait(self) -> None:
        """Waits until the job has ended.

        Raises LaunchError with the first rank that failed; if no rank reported a cause, with Slurm's output.
        """
        while not self._ended():
            self._follower.poll()
            time.sleep(_POLL)
        statuses = slurm_task.statuses(self._folder)
        well = len(statuses) == self._tasks and not any(statuses.values())
        self._follower.drain(failed=not well)
        if self._follower.failures:
            raise launch_error(list(self._follower.failures.values()), self._folder)
        if well:
            return
        number = self._job.job_id
        if not statuses:
            raise LaunchError(
                f"Slurm job {number} ended, and no task wrote into {self._folder}: it was cancelled, or that path is "
                f"not shared by all nodes (give an output_path that is). Slurm's output:\n{self._words()}",
                self._folder,
            )
        raise LaunchError(
            f"Slurm job {number}: {len(statuses)} of {self._tasks} tasks ended before cancellation, exit statuses "
            f"{sorted(set(statuses.values()))}, and no rank reported a cause:\n{self._words()}",
            self._folder,
        )

    def stop(self) -> None:
        """Cancels the job and waits up to 30 s for its end."""
        self._job.cancel(check=False)
        until = time.monotonic() + _END
        while self._squeue() and time.monotonic() < until:
            time.sleep(_POLL)

    def _ended(self) -> bool:
        if len(slurm_task.statuses(self._folder)) == self._tasks:
            return True
        if time.monotonic() - self._asked < _ASK:
            return False
        state = self._squeue()
        self._asked = time.monotonic()
        if state and state != self._state:
            self._state = state
            self._report(f"smddp: Slurm job {self._job.job_id} is {state}")
        return not state

    def _squeue(self) -> str:
        """Returns the state of a queued or running job. Avoids sacct, which needs a database."""
        command = ["squeue", "--noheader", "--jobs", self._job.job_id, "--format", "%T %r"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            # A busy controller fails with other messages.
            return "" if "Invalid job id" in done.stderr else self._state or "UNKNOWN"
        state, _, reason = done.stdout.strip().partition(" ")
        return f"{state} ({reason})" if reason not in ("", "None") else state

    def _words(self) -> str:
        found = []
        for file in sorted((self._folder / "submitit").glob(f"{self._job.job_id}*_log.err")):
            found += file.read_text(errors="replace").splitlines()[-20:]
        return "\n".join(found[-20:]) or "(none)"
