"""Timer for parts of a script."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from smddp.sagemaker.logger import get_logger


@contextmanager
def timeit(flag: bool, title: str = "", rank: int | None = None) -> Iterator[None]:
    """Log the body's wall-clock time on the host in seconds, also if it raises.

    Args:
        flag: False: measure and log nothing.
        title: what the body does.
        rank: included in the line, to distinguish the lines of several ranks in one file.
    """
    if not flag:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        where = "" if rank is None else f" on rank {rank}"
        get_logger().info("%s%s took %.3f s", title or "the timed part", where, time.perf_counter() - start)
