"""Fixtures of the torch backend's tests."""

from collections.abc import Iterator

import pytest
from ranks.pool import Pools


@pytest.fixture(scope="package")
def pools() -> Iterator[Pools]:
    """The rank processes, one pool for each group size."""
    with Pools() as made:
        yield made
