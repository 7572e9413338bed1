"""A job that was started, by this package or by an engine."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smddp.estimator import engines, job
from smddp.estimator.checkpoints import Checkpoints
from smddp.estimator.metrics import Metric, Metrics
from smddp.estimator.restarts import Limits, Restarts

#: Starts the ranks of an attempt, a number from 1. The event ends the wait for hosts.
Start = Callable[[int, threading.Event], engines.Started]


class Job:
    """A job that was started.

    Attributes:
        status: "InProgress", "Completed", "Failed", or "Stopped" after max_run or max_wait, as SageMaker names them.
        folder: path of the job's folder.
        restarts: number of restarts after a lost host.
    """

    def __init__(
        self,
        name: str,
        folder: job.Folder,
        *,
        packs: bool,
        packs_model: bool,
        max_run: int | None,
        restarts: Restarts,
        metrics: Metrics,
        checkpoints: Checkpoints | None,
        tags: Sequence[Mapping[str, str]],
    ) -> None:
        self.name = self.job_name = self.training_job_name = name
        self.folder = folder.path
        self.status = "InProgress"
        self.restarts = 0
        self._files, self._packs, self._packs_model = folder, packs, packs_model
        self._seconds_of = {"max_run": max_run, "max_wait": restarts.max_wait}
        self._policy, self._metrics, self._checkpoints, self._tags = restarts, metrics, checkpoints, tags
        self._begun = time.monotonic()
        self._seconds: float | None = None
        self._ends = threading.Event()
        self._stopped_by = ""
        self._error: BaseException | None = None
        self._run: engines.Started | None = None
        self._thread: threading.Thread | None = None

    @property
    def metrics(self) -> list[Metric]:
        """Values of metric_definitions found up to now."""
        return list(self._metrics.values)

    def describe(self) -> dict[str, Any]:
        """Returns the job's summary with the names of SageMaker's DescribeTrainingJob; `job.json` has it at the end."""
        seconds = time.monotonic() - self._begun if self._seconds is None else self._seconds
        found: dict[str, Any] = {
            "TrainingJobName": self.name,
            "TrainingJobStatus": self.status,
            "TrainingTimeInSeconds": round(seconds, 1),
            "FinalMetricDataList": [
                {"MetricName": each.name, "Value": each.value, "Timestamp": each.timestamp}
                for each in self._last_metrics()
            ],
            "Tags": [dict(each) for each in self._tags],
            "Restarts": self.restarts,
        }
        if self._error is not None:
            found["FailureReason"] = str(self._error)
        return found

    def _start(self, make: Start, report: Callable[[str], None]) -> None:
        self._limits = Limits(self._seconds_of["max_run"], self._seconds_of["max_wait"], self._stop_at)
        try:
            self._begin_attempt(make)
        except BaseException:
            self._limits.cancel()
            self._release()
            raise

        def follow() -> None:
            try:
                self._wait_for_ranks(make, report)
                if self._packs:
                    self._files.pack(self._packs_model)
                if self.status == "Stopped":
                    self._report_failure(self._stopped_text())
                else:
                    self.status = "Completed"
                    (self._files.output / "success").touch()
            except BaseException as error:
                self.status = "Failed"
                self._report_failure(str(error))
                self._error = error
            finally:
                self._limits.cancel()
                self._seconds = time.monotonic() - self._begun
                try:
                    self._metrics.write(self.folder / "metrics.jsonl")
                    if self.folder.is_dir():
                        (self.folder / "job.json").write_text(json.dumps(self.describe(), indent=1))
                finally:
                    self._release()
                if self._error is None:
                    last = "".join(f" {each.name}={each.value:g}" for each in self._last_metrics())
                    report(f"smddp: job {self.name} ended after {self._seconds:.1f} s{last}")

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    def _last_metrics(self) -> list[Metric]:
        return list({each.name: each for each in self.metrics}.values())

    def _begin_attempt(self, make: Start) -> None:
        self._run = make(self.restarts + 1, self._ends)
        self._limits.ranks_begin()
        if self._ends.is_set():
            self._run.stop()

    def _wait_for_ranks(self, make: Start, report: Callable[[str], None]) -> None:
        """Waits for the ranks, and restarts them after a lost host where the job's conditions allow it."""
        restarting = False
        while True:
            try:
                if restarting:
                    self._begin_attempt(make)
                assert self._run is not None
                try:
                    self._run.wait()
                finally:
                    self._limits.ranks_ended()
                return
            except BaseException as error:
                if self.status == "Stopped":
                    return
                pause = None if self._ends.is_set() else self._policy.pause(error, self.restarts)
                if pause is None:
                    raise
                self.restarts += 1
                restarting = True
                first = str(error).partition("\n")[0]
                report(f"smddp: job {self.name}: restart {self.restarts} in {pause:g} s after a lost host: {first}")
                if self._ends.wait(pause):
                    if self.status == "Stopped":
                        return
                    raise

    def _stop_at(self, limit: str) -> None:
        if self.status == "InProgress":
            self._stopped_by, self.status = limit, "Stopped"
            self._end_ranks()

    def _end_ranks(self) -> None:
        self._ends.set()
        if self._run is not None:
            self._run.stop()

    def _stopped_text(self) -> str:
        limit = self._stopped_by
        return (
            f"job {self.name} was stopped after {limit}={self._seconds_of[limit]} seconds; "
            "its model folder has the files written before that"
        )

    def _report_failure(self, text: str) -> None:
        """Writes output/failure, unless the script has written its own reason."""
        file = self._files.output / "failure"
        if not file.exists():
            file.write_text(text)

    def _release(self) -> None:
        self._files.token.unlink(missing_ok=True)
        if self._checkpoints is not None:
            self._checkpoints.release()

    def wait(self, logs: Any = "All") -> None:
        """Waits for the end of the job. A Ctrl-C ends the job on all hosts.

        Warns if max_run or max_wait ended it, as the SDK does.

        Args:
            logs: No effect; `fit` chooses whether it prints the output.

        Raises:
            LaunchError: The job failed.
        """
        assert self._thread is not None and self._run is not None
        try:
            self._thread.join()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error
        if self.status == "Stopped":
            warnings.warn(self._stopped_text(), stacklevel=2)

    def stop(self) -> None:
        """Ends the job on all hosts."""
        assert self._thread is not None
        self._end_ranks()
        self._thread.join()
