from pathlib import Path

import pytest
from ranks.pool import client_pool


@pytest.fixture(scope="session")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    with client_pool(4, str(Path(__file__).parent)) as pool:
        yield pool
