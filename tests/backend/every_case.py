"""All cases of this folder, for runs over other transports and several hosts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Tests of properties that only ranks of one node have, and the reason.
ONE_NODE = {
    "test_the_profiler_shows_sizes_and_path_of_every_call": "the path is not shared memory",
    "test_collectives_read_symmetric_memory_and_return_it_after_each_call": "a rank alone on its node has no readers",
    "test_fsdp2_allocates_its_buffers_in_symmetric_memory": "a rank alone on its node has no readers",
}
# Seconds that a case may take in runs over other transports; longer ones run over shared memory alone.
_MOST_SECONDS = 300.0


def all_cases() -> Iterator[tuple[str, str, Any]]:
    """Yields module, name and test of this folder's tests made by `on_ranks`, without the longest."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        try:
            module = importlib.import_module(f"backend.{file.stem}")
        except pytest.skip.Exception:
            continue  # not for this torch
        for name, test in vars(module).items():
            if hasattr(test, "case") and hasattr(test, "sizes") and test.seconds <= _MOST_SECONDS:
                yield module.__name__, name, test


def sizes_across(sizes: tuple[int, ...], usual: list[int]) -> list[int]:
    """Returns the numbers of ranks for runs across nodes: the case's only one above 1, or the `usual` ones.

    Cases for one rank have none, since they use no transport between nodes.
    """
    several = [size for size in sizes if size > 1]
    return several if len(several) <= 1 else usual
