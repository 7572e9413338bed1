"""Checkpoints that persist over jobs: the folder of checkpoint_s3_uri, and the path at which a script opens it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import warnings
from pathlib import Path

from smddp import validation
from smddp.estimator.inputs import folder_of
from smddp.estimator.job import Folder

#: Where a training container has the checkpoints, unless checkpoint_local_path names another path.
DEFAULT_PATH = "/opt/ml/checkpoints"


def check(uri: object, local_path: object) -> None:
    """Raises ValueError for a checkpoint_s3_uri or checkpoint_local_path that no job here can have."""
    if uri is not None:
        folder_of(uri, "checkpoint_s3_uri")
    if local_path is None:
        return
    if uri is None:
        raise ValueError(
            "checkpoint_local_path is given without checkpoint_s3_uri, and checkpoints would not persist: give "
            "checkpoint_s3_uri=, a path or file://"
        )
    if not validation.line(str(local_path), "checkpoint_local_path").startswith("/"):
        raise ValueError(f"checkpoint_local_path is {str(local_path)!r}: expected an absolute path")


class Checkpoints:
    """The checkpoints of one job.

    FOLDER/checkpoints is a link to the persistent folder. A second link, at checkpoint_local_path, serves scripts that
    open that path without a hyperparameter. It exists while jobs with these checkpoints run on this machine.
    """

    def __init__(self, uri: str, local_path: str | None, folder: Folder) -> None:
        self._place = folder_of(uri, "checkpoint_s3_uri")
        self._path = Path(local_path or DEFAULT_PATH)
        self._folder = folder
        self._descriptor: int | None = None
        #: Folders above the link that did not exist, the innermost first.
        self._new_folders: list[Path] = []

    def make(self, link_here: bool) -> None:
        """Makes the folder and the links. link_here: ranks run on this machine alone.

        Raises ValueError where checkpoint_local_path is something else. Warns where it cannot be a link.
        """
        self._place.mkdir(parents=True, exist_ok=True)
        self._folder.checkpoints.symlink_to(self._place)
        if self._path.resolve() == self._place.resolve():
            self._hold()
            return
        if not link_here:
            self._warn("is not linked on other hosts")
            return
        if self._path.is_symlink():
            self._remove_unused_link()
        elif self._path.exists():
            raise ValueError(
                f"checkpoint_local_path: {self._path} exists on this machine and is not the folder of "
                f"checkpoint_s3_uri, {self._place}: remove it, or give another checkpoint_local_path"
            )
        self._hold()
        try:
            self._new_folders = [parent for parent in self._path.parents if not parent.exists()]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.symlink_to(self._place)
        except OSError as error:
            self._warn(f"cannot be made a link to {self._place} ({error.strerror})")

    def release(self) -> None:
        """Removes the link at checkpoint_local_path, unless another job with the same checkpoints runs."""
        if self._descriptor is None:
            return
        if self._path.is_symlink() and self._path.resolve() == self._place.resolve() and _unused(self._descriptor):
            self._path.unlink(missing_ok=True)
            for folder in self._new_folders:
                with contextlib.suppress(OSError):  # in use
                    folder.rmdir()
        os.close(self._descriptor)
        self._descriptor = None

    def _hold(self) -> None:
        """Marks the folder as in use by a running job: a shared lock, which ends with this process."""
        self._descriptor = os.open(self._place, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _remove_unused_link(self) -> None:
        """Removes a link that an ended job left. Raises ValueError for the link of a running job."""
        there = self._path.resolve()
        try:
            descriptor = os.open(there, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            self._path.unlink()
            return
        try:
            if not _unused(descriptor):
                raise ValueError(
                    f"checkpoint_local_path: {self._path} belongs to a running job, whose checkpoints are in {there}: "
                    "give another checkpoint_local_path, or wait for that job"
                )
            self._path.unlink()
        finally:
            os.close(descriptor)

    def _warn(self, why: str) -> None:
        warnings.warn(
            f"checkpoint_local_path: {self._path} {why}: a script that opens this path itself does not find the "
            f"checkpoints; pass the path as a hyperparameter, which becomes {self._folder.checkpoints}",
            stacklevel=2,
        )


def _unused(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
