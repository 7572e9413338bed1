"""Fixtures of the tests across hosts. They need network namespaces, of root or of a user; `netlab check` tells."""

from collections.abc import Iterator

import pytest
from backend.ranks import BACKEND

from hosts import netlab
from hosts.pool import Labs


@pytest.fixture(scope="session", autouse=True)
def lab_is_possible() -> None:
    if reason := netlab.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def labs() -> Iterator[Labs]:
    """The lab whose hosts hold rank processes."""
    made = Labs()
    yield made
    made.close()


@pytest.fixture
def backend() -> str:
    """The backend under test; SMDDP_TEST_BACKEND names another to compare with."""
    return BACKEND
