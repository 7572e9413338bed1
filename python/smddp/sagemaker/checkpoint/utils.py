"""Retention of the newest checkpoints in a directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Callable
from typing import Any

from smddp.sagemaker.logger import get_logger

# Prefix of folders that a rank is deleting.
_DELETED = ".deleted."


def SORT_BY_LAST_INT(name: str) -> int:
    """Returns the last integer in ``name``: sorts "llama-900steps" before "llama-1000steps".

    Raises ValueError if there is none.
    """
    numbers = re.findall(r"\d+", name)
    if not numbers:
        raise ValueError(f"no number in {name!r} to sort by")
    return int(numbers[-1])


def limit_num_subdirs(
    dir: str | os.PathLike[str],
    n: int,
    sort_fn: Callable[[str], Any] | None = SORT_BY_LAST_INT,
    regex: str | None = None,
    log: bool = True,
) -> list[str]:
    """Delete the oldest sub-folders of ``dir`` until ``n`` are left. All ranks may call it at once.

    Args:
        dir: the folder that holds the checkpoints' folders. With ``regex`` also a checkpoint itself, with files of
            `torch.distributed.checkpoint` in it: then the checkpoints beside it count, where its name, or the name of
            the folder around it, begins with a match.
        n: how many to keep, at least 1.
        sort_fn: of a sub-folder's name; the smallest value is the oldest. None: by the time of modification.
        regex: only sub-folders whose name begins with a match count, and may be deleted. None: all; with
            SORT_BY_LAST_INT those whose name holds a number.
        log: log what is deleted.

    Returns the paths that this call deleted, the oldest first; an empty list if there is no ``dir``. Links are never
    followed or deleted. A folder is renamed before it is deleted, so one rank deletes it. An interrupted call leaves
    a folder ``.deleted.*``, which no later call counts and the next one deletes.

    Raises TypeError or ValueError for a wrong ``n`` or ``regex``, or for a name that ``sort_fn`` refuses, before
    anything is deleted.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n is the number of sub-folders to keep, an int, not {n!r}")
    if n < 1:
        raise ValueError(f"n is {n}: keep at least 1, or do not call limit_num_subdirs()")
    try:
        wanted = re.compile(regex or "")
    except re.error as error:
        raise ValueError(f"regex {regex!r} is not a regular expression: {error}")
    root = os.fspath(dir) if regex is None else _around(os.fspath(dir), wanted)
    found = [e for e in _subdirs(root) if wanted.match(e.name) and not e.name.startswith(_DELETED)]
    if sort_fn is SORT_BY_LAST_INT and regex is None:
        found = [e for e in found if re.search(r"\d", e.name)]
    found.sort(key=_modified if sort_fn is None else lambda entry: sort_fn(entry.name))
    deleted = []
    for path in (entry.path for entry in found[:-n]):
        doomed = _claim(root, os.path.basename(path), os.path.basename(path))
        if doomed is None:
            continue
        if log:
            get_logger().info("deleting %s: %d newer ones are kept", path, n)
        _remove(doomed)
        deleted.append(path)
    for left in (e.name for e in _subdirs(root) if e.name.startswith(_DELETED)):
        doomed = _claim(root, left, left.removeprefix(_DELETED).rpartition(".")[0])
        if doomed is not None:
            _remove(doomed)
    return deleted


def _claim(root: str, name: str, of: str) -> str | None:
    """Rename ``root/name``, a folder once named ``of``, for deletion. Returns None if another rank was faster."""
    doomed = os.path.join(root, f"{_DELETED}{of}.{uuid.uuid4().hex}")
    try:
        os.rename(os.path.join(root, name), doomed)
    except FileNotFoundError:
        return None
    return doomed


def _remove(path: str) -> None:
    """Delete a folder, whose entries another rank may be deleting too."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def _subdirs(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:  # such as that of an expert rank that wrote nothing
        return []


def _modified(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:  # another rank has renamed it
        return 0


def _around(folder: str, wanted: re.Pattern[str]) -> str:
    """Returns the directory of the checkpoints: ``folder``, or its parent if ``folder`` is a checkpoint."""
    folder = os.path.abspath(folder)
    if os.path.isdir(folder) and any(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(folder)):
        for checkpoint in (folder, os.path.dirname(folder)):
            if wanted.match(os.path.basename(checkpoint)):
                return os.path.dirname(checkpoint)
    return folder
