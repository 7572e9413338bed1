import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
# The pool of ranks is that of tests/clients; the cases and their models are here.
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "clients")]


@pytest.fixture(scope="package")
def ranks():
    """Four ranks of the backend under test, shared by all cases."""
    from ranks import Ranks

    pool = Ranks(4, path=HERE)
    yield pool
    pool.close()
