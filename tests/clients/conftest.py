from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    from ranks.pool import client_pool

    with client_pool(4, str(Path(__file__).parent)) as pool:
        yield pool
