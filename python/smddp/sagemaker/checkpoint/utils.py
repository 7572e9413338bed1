"""Keeping only the newest checkpoints of a folder."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from typing import Any

from smddp.sagemaker.logger import get_logger


def SORT_BY_LAST_INT(name: str) -> int:
    """The last whole number in ``name``, by which "llama-900steps" comes before "llama-1000steps".

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
    """Delete the oldest sub-folders of ``dir`` until ``n`` are left. Call it on one rank of each file system.

    Args:
        dir: the folder that holds the checkpoints' folders.
        n: how many to keep, at least 1.
        sort_fn: of a sub-folder's name; the smallest value is the oldest. None: by the time of modification.
        regex: only sub-folders whose name begins with a match count, and may be deleted. None: all; with
            SORT_BY_LAST_INT those whose name holds a number.
        log: log what is deleted.

    Returns the paths deleted, the oldest first. Links are never followed or deleted.

    Raises TypeError or ValueError for a wrong ``n`` or ``regex``, or for a name that ``sort_fn`` refuses, before
    anything is deleted; FileNotFoundError if there is no ``dir``.
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n is the number of sub-folders to keep, an int, not {n!r}")
    if n < 1:
        raise ValueError(f"n is {n}: keep at least 1, or do not call limit_num_subdirs()")
    try:
        wanted = re.compile(regex or "")
    except re.error as error:
        raise ValueError(f"regex {regex!r} is not a regular expression: {error}")
    with os.scandir(dir) as entries:
        found = [e for e in entries if e.is_dir(follow_symlinks=False) and wanted.match(e.name)]
    if sort_fn is SORT_BY_LAST_INT and regex is None:
        found = [e for e in found if re.search(r"\d", e.name)]
    if sort_fn is None:
        found.sort(key=lambda entry: entry.stat().st_mtime_ns)
    else:
        found.sort(key=lambda entry: sort_fn(entry.name))
    oldest = [entry.path for entry in found[:-n]]
    for path in oldest:
        if log:
            get_logger().info("deleting %s: %d newer ones are kept", path, n)
        shutil.rmtree(path)
    return oldest
