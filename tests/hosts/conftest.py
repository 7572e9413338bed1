"""Fixtures of the tests across hosts. They need network namespaces, of root or of a user; see `netlab check`."""

from collections.abc import Iterator

import pytest
from ranks.group import BACKEND

from hosts import netlab
from hosts.pool import Labs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one lab run one after the other: starting its ranks takes longer than most of them."""
    in_labs = [at for at, item in enumerate(items) if "lab" in _params(item)]
    order: dict[object, int] = {}
    for at in in_labs:
        order.setdefault(_params(items[at])["lab"], len(order))
    ordered = sorted((items[at] for at in in_labs), key=lambda item: order[_params(item)["lab"]])
    for at, item in zip(in_labs, ordered):
        items[at] = item


def _params(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


@pytest.fixture(scope="session", autouse=True)
def lab_is_possible() -> None:
    if reason := netlab.why_not():
        pytest.skip(reason)


@pytest.fixture(scope="package")
def labs() -> Iterator[Labs]:
    """The lab whose hosts hold rank processes."""
    made = Labs()
    yield made
    made.close()


@pytest.fixture
def backend() -> str:
    """The backend under test; SMDDP_TEST_BACKEND names another to compare with."""
    return BACKEND
