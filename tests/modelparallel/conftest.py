from __future__ import annotations

import os
import sys

import pytest
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
# The cases and their models.
sys.path.insert(0, HERE)


@pytest.fixture(scope="package")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    with client_pool(4, HERE) as pool:
        yield pool
