"""Test doubles and fuzz targets are dependencies of tests only, so no program or wheel contains them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import tomllib

CRATES = Path(__file__).parents[2] / "crates"
DOUBLES = sorted(path.name for path in CRATES.glob("fake-*"))


@pytest.mark.parametrize("manifest", sorted(CRATES.glob("*/Cargo.toml")), ids=lambda path: path.parent.name)
def test_no_crate_depends_on_a_double_outside_of_its_tests(manifest: Path):
    crate = tomllib.loads(manifest.read_text())
    tables = [crate, *crate.get("target", {}).values()]
    used = [name for table in tables for kind in ("dependencies", "build-dependencies") for name in table.get(kind, {})]
    assert DOUBLES and not set(DOUBLES) & set(used)


@pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo")
@pytest.mark.parametrize("program", ["smddp-py", "smddp-tensorflow", "smddp-bench"])
def test_no_program_is_built_with_the_code_of_tests(program: str):
    command = ["cargo", "tree", "--offline", "--edges", "normal,features", "--package", program]
    found = subprocess.run(command, cwd=CRATES.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "smddp-group" in found.stdout
    wrong = [line for line in found.stdout.splitlines() if 'feature "testing"' in line or "smddp-testing" in line]
    assert not wrong, wrong
