"""No wheel has the recorder of the failure monitor: no build of a wheel turns the cargo feature `record` on."""

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads TOML")
ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "crates").glob("*/Cargo.toml"))
#: Files that build wheels.
BUILDS = ["Makefile", "scripts/build-wheel.sh", "scripts/check-package.sh"]
#: Options of cargo and maturin that enable features.
FEATURES = re.compile(r"--features\b|--all-features\b|(?<=\s)-F\s*\w|MATURIN_PEP517_ARGS")


def manifest(path: Path) -> dict:
    return tomllib.loads(path.read_text())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_no_crate_turns_the_recorder_on(path: Path) -> None:
    crate = manifest(path)
    features = crate.get("features", {})
    assert "default" not in features, "a default feature may enable another one"
    passed_on = {name: [part for part in parts if part.endswith("record")] for name, parts in features.items()}
    assert {name for name, parts in passed_on.items() if parts} <= {"record"}
    tables = [crate, *crate.get("target", {}).values()]
    kinds = ("dependencies", "dev-dependencies", "build-dependencies")
    uses = [use for table in tables for kind in kinds for use in table.get(kind, {}).values()]
    assert not [use for use in uses if isinstance(use, dict) and "record" in use.get("features", [])]


def test_no_dependency_of_the_workspace_turns_the_recorder_on() -> None:
    uses = manifest(ROOT / "Cargo.toml")["workspace"]["dependencies"].values()
    assert not [use for use in uses if isinstance(use, dict) and "record" in use.get("features", [])]


def test_the_wheel_is_built_without_features() -> None:
    options = manifest(ROOT / "pyproject.toml")["tool"]["maturin"]
    assert not {"features", "all-features", "cargo-extra-args"} & set(options)
    named = {}
    for name in BUILDS:
        lines = [line.strip() for line in (ROOT / name).read_text().splitlines() if FEATURES.search(line)]
        named |= {name: lines} if lines else {}
    # The target that records: its module goes into no wheel.
    assert named == {"Makefile": ["cargo build --quiet -p smddp-py --features record"]}


def test_the_recorder_is_compiled_with_the_feature_only() -> None:
    core = ROOT / "crates/smddp-core/src"
    gated = '#[cfg(any(test, feature = "record"))]\n'
    assert gated + "mod record;" in (core / "engine/mod.rs").read_text()
    assert gated + "pub(crate) mod case_text;" in (core / "failure/mod.rs").read_text()
    users = [file for file in core.rglob("*.rs") if "SMDDP_TEST_FAILURE_RECORDS" in file.read_text()]
    assert [file.relative_to(core).as_posix() for file in users] == ["engine/record.rs"]
