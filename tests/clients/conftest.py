import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes longer than the default run should")


@pytest.fixture(scope="session")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    from ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.close()
