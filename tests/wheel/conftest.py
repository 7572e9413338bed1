"""The wheel that these tests are about."""

import os
from pathlib import Path

import pytest

DIST = Path(__file__).parents[2] / "dist"


@pytest.fixture(scope="session")
def wheel() -> Path:
    if given := os.environ.get("WHEEL"):
        return Path(given).resolve()
    found = list(DIST.glob("smddp-*.whl"))
    if not found:
        pytest.skip("no wheel in dist/: `make wheel` builds it")
    assert len(found) == 1, f"one wheel should be in dist/, not {[path.name for path in found]}"
    return found[0]
