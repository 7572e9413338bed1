"""Fixtures of tests with CUDA tensors that need no GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks.pool import Pool, Pools

from device.fakes import fake

__all__ = ["fake", "machines"]


@pytest.fixture(scope="package")
def machines() -> Iterator[Callable[[str], Pool]]:
    """Rank processes over the fake driver, by the name of their machine (device.machines)."""
    from device.machines import MACHINES

    library = os.environ.get("SMDDP_TEST_CUDA_LIBRARY", "")
    if not Path(library).is_file():
        pytest.fail(
            f"SMDDP_TEST_CUDA_LIBRARY ({library!r}) is not the file of the fake driver; `make test-python` sets it, "
            "or: export SMDDP_TEST_CUDA_LIBRARY=$(cargo run -q -p fake-libcuda)"
        )
    with Pools(lambda name: MACHINES[name].pool(library)) as pools:
        yield pools.of
