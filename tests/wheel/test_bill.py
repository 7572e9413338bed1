"""The wheel's bill of materials, without build paths, and all licences."""

import json
import re
import zipfile
from pathlib import Path

import pytest

LOCK = Path(__file__).parents[2] / "Cargo.lock"


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if ".dist-info/" in name and name.endswith(suffix)]
        return archive.read(name).decode()


@pytest.fixture(scope="module")
def bill(wheel: Path) -> str:
    return read(wheel, ".cyclonedx.json")


@pytest.fixture(scope="module")
def crates(bill: str) -> list[dict]:
    return json.loads(bill)["components"]


def test_the_bill_names_the_wheel_and_the_module(wheel: Path, bill: str, crates: list[dict]):
    top = json.loads(bill)["metadata"]["component"]
    assert wheel.name.startswith(f"{top['name']}-{top['version']}-")
    assert {"smddp-py", "smddp-core", "pyo3", "ring"} <= {crate["name"] for crate in crates}


def test_bill_is_independent_of_machine_and_time(bill: str):
    found = json.loads(bill)
    assert "serialNumber" not in found and "timestamp" not in found["metadata"]
    assert not re.findall(r"file:|[a-z]:\\\\|/(?:home|root|tmp|work|usr|var|Users)/", bill)
    assert not re.findall(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", bill)


def test_the_bill_has_no_crate_of_another_platform(crates: list[dict]):
    others = re.compile(r"windows|winapi|wasi|wasm|core-foundation|android|redox|hermit|r-efi")
    assert [crate["name"] for crate in crates if others.match(crate["name"])] == []


def test_each_crate_of_the_bill_is_the_locked_one(crates: list[dict]):
    locked = re.findall(r'name = "(.+)"\nversion = "(.+)"(?:\nsource = ".+"\nchecksum = "(\w+)")?', LOCK.read_text())
    said = {
        (crate["name"], crate["version"], crate["hashes"][0]["content"] if "hashes" in crate else "")
        for crate in crates
    }
    assert said - set(locked) == set(), "`make third-party` writes the bill again"


def test_each_dependency_in_the_bill_leads_to_a_component(bill: str):
    found = json.loads(bill)
    known = {found["metadata"]["component"]["bom-ref"], *(crate["bom-ref"] for crate in found["components"])}
    rows = {row["ref"]: set(row["dependsOn"]) for row in found["dependencies"]}
    assert rows.keys() == known
    assert set().union(*rows.values()) <= known


def test_each_crate_of_the_bill_has_its_licence_s_text_in_the_wheel(wheel: Path, crates: list[dict]):
    page = read(wheel, "third-party/LICENSES.txt")
    listed, *texts = page.split("=" * 100 + "\n")
    owners = {owner for line in texts[::2] for owner in line.strip().split(", ")}
    for crate in crates:
        if "purl" not in crate:
            continue  # our own, under LICENSE
        assert f"  {crate['name']} {crate['version']}: {crate['licenses'][0]['expression']}" in listed
        assert f"{crate['name']} {crate['version']}" in owners


def test_the_module_has_no_path_of_the_machine_it_was_built_on(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        module = archive.read("smddp/_core.abi3.so")
    assert str(Path.home() / ".cargo").encode() not in module
    assert str(LOCK.parent).encode() not in module
