"""third-party/ says what cargo would build now."""

import shutil
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts():
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not on the path")
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("name", ["licences", "sbom"])
def test_the_committed_file_is_that_of_cargo_lock(name: str):
    script = __import__(name)
    assert script.OUT.read_text() == script.page(), "`make third-party` writes it again"
