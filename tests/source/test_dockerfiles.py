"""The Dockerfiles install what the tests of real launchers run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTED = (ROOT / "tests" / "launch" / "third_party" / "requirements-launch.txt").read_text()


@pytest.mark.parametrize("package", ["mpi4py", "sagemaker-training", "sagemaker-pytorch-training"])
def test_versions_are_those_that_are_tested(package):
    (version,) = re.findall(rf"^{package}==(\S+)$", TESTED, re.MULTILINE)
    assert re.findall(rf" {package}==(\S+)", (ROOT / "docker" / "adapt.Dockerfile").read_text()) == [version]


@pytest.mark.parametrize("name", ["extend", "adapt"])
def test_copied_files_exist(name):
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    source, program = (re.search(rf"^ARG {what}=(.+)$", text, re.MULTILINE)[1] for what in ("SOURCE", "PROGRAM"))
    assert (ROOT / source / program).is_file()
