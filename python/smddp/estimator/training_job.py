"""A job that was started, by this package or by an engine."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from smddp.estimator import engines, job
from smddp.estimator.checkpoints import Checkpoints
from smddp.estimator.metrics import Metric, Metrics


class Job:
    """A job that was started.

    Attributes:
        status: "InProgress", "Completed", "Failed", or "Stopped" after max_run, as SageMaker names them.
        folder: path of the job's folder.
    """

    def __init__(
        self,
        name: str,
        folder: job.Folder,
        *,
        packs: bool,
        packs_model: bool,
        max_run: int | None,
        metrics: Metrics,
        checkpoints: Checkpoints | None,
    ) -> None:
        self.name = self.job_name = name
        self.folder = folder.path
        self.status = "InProgress"
        self._files, self._packs, self._packs_model = folder, packs, packs_model
        self._max_run, self._metrics, self._checkpoints = max_run, metrics, checkpoints
        self._error: BaseException | None = None
        self._run: engines.Started | None = None
        self._thread: threading.Thread | None = None

    @property
    def metrics(self) -> list[Metric]:
        """Values of metric_definitions found up to now."""
        return list(self._metrics.values)

    def _start(self, make: Callable[[], engines.Started], report: Callable[[str], None]) -> None:
        begun = time.monotonic()
        try:
            self._run = make()
        except BaseException:
            self._release()
            raise
        limit = threading.Timer(self._max_run or 0, self._stop_at_limit)
        limit.daemon = True
        if self._max_run is not None:
            limit.start()

        def follow() -> None:
            assert self._run is not None
            try:
                self._wait_for_ranks()
                if self._packs:
                    self._files.pack(self._packs_model)
                if self.status == "Stopped":
                    self._report_failure(self._stopped_text())
                else:
                    self.status = "Completed"
                    (self._files.output / "success").touch()
                report(f"smddp: job {self.name} ended after {time.monotonic() - begun:.1f} s")
            except BaseException as error:
                self.status = "Failed"
                self._report_failure(str(error))
                self._error = error
            finally:
                limit.cancel()
                self._metrics.write(self.folder / "metrics.jsonl")
                self._release()

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    def _wait_for_ranks(self) -> None:
        assert self._run is not None
        try:
            self._run.wait()
        except BaseException:
            if self.status != "Stopped":
                raise

    def _stop_at_limit(self) -> None:
        assert self._run is not None
        if self.status == "InProgress":
            self.status = "Stopped"
            self._run.stop()

    def _stopped_text(self) -> str:
        return f"job {self.name} was stopped after max_run={self._max_run} seconds; its model is what was there then"

    def _report_failure(self, text: str) -> None:
        """Writes output/failure, unless the script has written its own reason."""
        file = self._files.output / "failure"
        if not file.exists():
            file.write_text(text)

    def _release(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.release()

    def wait(self, logs: Any = "All") -> None:
        """Waits for the end of the job. A Ctrl-C ends the job on all hosts.

        Raises LaunchError where it failed. Warns where max_run ended it, as the SDK does.
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
        assert self._thread is not None and self._run is not None
        self._run.stop()
        self._thread.join()
