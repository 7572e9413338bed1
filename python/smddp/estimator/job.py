"""The folder of a job, with the layout of a training container's /opt/ml."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Paths of a training container that the job's folder stands in for.
_IN_CONTAINER = re.compile(r"/opt/ml/(checkpoints|code|input|model|output)(/|$)")


@dataclass(frozen=True)
class Folder:
    """The files of a job; the same path on every host."""

    path: Path

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def output(self) -> Path:
        return self.path / "output"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def token(self) -> Path:
        """The secret of a job with encryption."""
        return self.path / "job-token"

    @property
    def attempt(self) -> int:
        """Number of the attempt that runs, from 1."""
        file = self.path / "attempt"
        return int(file.read_text()) if file.exists() else 1

    @property
    def failures(self) -> Path:
        """Failure reports of ranks."""
        return self.path / "failures"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def channel(self, name: str) -> Path:
        return self.path / "input" / "data" / name

    def make(self) -> None:
        """Creates the folders, all empty."""
        outputs = (self.model, self.output / "data", self.output / "intermediate")
        for part in (self.code, *outputs, self.failures, self.logs, self.channel("")):
            part.mkdir(parents=True, exist_ok=True)
        (self.path / "input" / "config").mkdir(exist_ok=True)

    def reset(self, attempt: int) -> None:
        """Removes results and failure reports of earlier attempts. Logs, code, channels and checkpoints remain."""
        for part in (self.model, self.output / "data", self.output / "intermediate", self.failures):
            if part.is_symlink():  # a script's link to a folder outside of the job's
                part.unlink()
                part.mkdir()
            for each in part.iterdir() if part.is_dir() else ():
                shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink(missing_ok=True)
        (self.output / "failure").unlink(missing_ok=True)
        (self.path / "attempt").write_text(str(attempt))

    def write(self, name: str, value: object) -> None:
        """Writes a configuration file: hyperparameters, resourceconfig, inputdataconfig."""
        (self.path / "input" / "config" / f"{name}.json").write_text(json.dumps(value, indent=1))

    def pack(self, model: bool = True) -> None:
        """Writes model.tar.gz and output.tar.gz. model: False leaves the model as a folder."""
        packed = [(self.model, "model")] if model else []
        for folder, name in (*packed, (self.output / "data", "output")):
            with tarfile.open(self.path / f"{name}.tar.gz", "w:gz") as archive:
                for file in sorted(folder.iterdir()):
                    archive.add(file, file.name)

    def in_job(self, value: Any) -> Any:
        """Returns `value` with paths of a training container, such as /opt/ml/model, replaced by the job's own.

        Texts in lists and dicts are replaced as well. Other values are returned unchanged.
        """
        if isinstance(value, str):
            return f"{self.path}{value[len('/opt/ml') :]}" if _IN_CONTAINER.match(value) else value
        if isinstance(value, Mapping):
            return {name: self.in_job(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.in_job(each) for each in value]
        return value


def is_job_folder(path: Path) -> bool:
    """Returns whether `path` is the folder of a job that an estimator made."""
    return all((path / part).is_dir() for part in ("code", "failures", "logs", "input/config", "output/data"))


def rank_program(folder: Folder, python: str) -> list[str]:
    """Returns the words that precede each rank's command."""
    return [python, "-m", "smddp.estimator.rank", str(folder.path)]
