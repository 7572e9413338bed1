"""A job that was started, by whatever runs it."""

from __future__ import annotations

import threading
import time
from typing import Any

from smddp.estimator import engines, job


class Job:
    """A job that was started."""

    def __init__(self, name: str, folder: job.Folder, packs: bool = True) -> None:
        self._packs = packs
        self.name = self.job_name = name
        self.folder = folder.path
        self._files = folder
        self._error: BaseException | None = None
        self._run: engines.Started | None = None
        self._thread: threading.Thread | None = None

    def _start(self, make: Any, tell: Any) -> None:
        begun = time.monotonic()
        self._run = make()

        def follow() -> None:
            assert self._run is not None
            try:
                self._run.wait()
                if self._packs:
                    self._files.pack()
                (self._files.output / "success").touch()
                tell(f"smddp: job {self.name} ended after {time.monotonic() - begun:.1f} s")
            except BaseException as error:
                (self._files.output / "failure").write_text(str(error))
                self._error = error

        self._thread = threading.Thread(target=follow, daemon=True)
        self._thread.start()

    def wait(self, logs: Any = "All") -> None:
        """Until it has ended. A Ctrl-C ends it, on all hosts. Raises LaunchError where it failed."""
        assert self._thread is not None and self._run is not None
        try:
            self._thread.join()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it, on all hosts."""
        assert self._thread is not None and self._run is not None
        self._run.stop()
        self._thread.join()
