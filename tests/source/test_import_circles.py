"""Modules of a crate import each other one way."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from import_circles import Crate

CRATES = sorted(manifest.parent for manifest in (ROOT / "crates").glob("*/Cargo.toml"))


def circles(src: Path):
    return [(parent, circle) for parent, circle, _ in Crate(src).circles()]


@pytest.mark.parametrize("crate", CRATES, ids=lambda path: path.name)
def test_no_modules_beside_each_other_use_each_other_in_a_circle(crate):
    found = [f"{circle}: {uses}" for _, circle, uses in Crate(crate / "src").circles()]
    assert not found, "\n".join(found)


CORE = "startup communicator preview engine failure exec device bind kernels observe config log call sync error".split()


def test_modules_of_the_core_import_only_modules_after_them():
    crate = Crate(ROOT / "crates/smddp-core/src")
    found, modules = set(), {module[0] for module in crate.modules if module} - {"for_tests"}
    assert modules == set(CORE), "modules without a place in the order"
    for module, paths in crate.paths.items():
        for home in map(crate.home, paths):
            if module and home and CORE.index(module[0]) > CORE.index(home[0]):
                found.add(f"{'::'.join(module)} imports {'::'.join(home)}")
    assert not found, "\n".join(sorted(found))


def written(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "back",
    [
        "use crate::a::A;",
        "use crate::{c::C, a::{inner::X, A}};",
        "use super::a;\nfn f() { a::g(); }",
        "fn f() { crate::a::g(); }",
        "use super::Exported;",
        "use crate::c::Passed;",
    ],
)
def test_a_circle_is_found_however_it_is_written(tmp_path, back):
    written(
        tmp_path,
        {
            "lib.rs": "mod a; mod b; mod c;\nuse a::Exported;\n",
            "a/mod.rs": "use crate::b::B;\npub struct A;\npub struct Exported;\npub struct Passed;\n",
            "a/inner.rs": "pub struct X;\n",
            "b.rs": f"pub struct B;\n{back}\n",
            "c.rs": "pub use crate::a::Passed;\npub struct C;\n",
        },
    )
    assert [(parent, set(circle) - {"c"}) for parent, circle in circles(tmp_path)] == [((), {"a", "b"})]


def test_acyclic_imports_are_not_reported(tmp_path):
    """A child that uses its parent, what only tests use, and what a comment says."""
    written(
        tmp_path,
        {
            "lib.rs": "mod a; mod b;\n",
            "a/mod.rs": "mod inner;\nuse inner::X;\nuse crate::b::B;\npub struct A;\n",
            "a/inner.rs": "use super::A;\npub struct X;\n",
            "b.rs": "pub struct B;\n// crate::a::A\n#[cfg(test)]\nmod tests {\n    use crate::a::A;\n    fn f() {}\n}\n"
            "#[cfg(test)]\nuse crate::a::A;\n#[cfg(any(test, fuzzing))]\nfn g(\n    a: crate::a::A,\n) {\n    a;\n}\n",
        },
    )
    assert circles(tmp_path) == []
