"""Test doubles are dependencies of tests only, so no program or wheel contains them."""

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
