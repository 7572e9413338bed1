"""Cargo profiles: the level of the last crate applies to everything that link-time optimisation generates."""

from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or newer reads TOML")
ROOT = Path(__file__).parents[2]


def _manifest(folder: Path) -> dict:
    return tomllib.loads((folder / "Cargo.toml").read_text())


def test_no_crate_with_a_program_lowers_its_level_in_the_release_profile() -> None:
    """An override of a program's own crate leaves the reductions of smddp-core unvectorised: half the speed."""
    overrides = _manifest(ROOT)["profile"]["release"]["package"]
    for folder in sorted((ROOT / "crates").iterdir()):
        manifest = _manifest(folder)
        name = manifest["package"]["name"]
        artefact = "bin" in manifest or (folder / "src/main.rs").exists()
        artefact |= "cdylib" in manifest.get("lib", {}).get("crate-type", [])
        assert not (artefact and name in overrides), f"[profile.release.package] lowers the level of {name}"


def test_the_wheel_lowers_no_level_of_its_module() -> None:
    assert "smddp-py" not in _manifest(ROOT)["profile"]["wheel"]["package"]
