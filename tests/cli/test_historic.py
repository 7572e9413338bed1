"""Reports of a historic package at the same paths."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "smdistributed-dataparallel"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH with what pip leaves of such a distribution."""
    about = tmp_path / "smdistributed_dataparallel-2.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 2.1\n")
    (about / "RECORD").write_text("smdistributed/dataparallel/torch/torch_smddp/__init__.py,,\n")
    return tmp_path


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, **environment}
    )


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "same paths as smddp" in line]


@pytest.mark.parametrize("module", ["smdistributed.dataparallel", "smdistributed.modelparallel", "torch"])
def test_import_warns_once_of_the_historic_package_with_a_remedy(beside: Path, module: str):
    # torch looks for backends as it is imported: the historic package may have replaced all of our smdistributed.
    code = f"import {module}, smdistributed.dataparallel, smdistributed.modelparallel"
    (warning,) = warnings(python("-c", code, PYTHONPATH=str(beside)))
    assert f"{NAME} 2.1" in warning and f"pip uninstall {NAME}" in warning


def test_one_rank_of_a_host_warns(beside: Path):
    code = "import smdistributed.dataparallel"
    assert warnings(python("-c", code, PYTHONPATH=str(beside), LOCAL_RANK="0"))
    assert not warnings(python("-c", code, PYTHONPATH=str(beside), LOCAL_RANK="1"))


def test_torch_is_imported_and_has_the_backend_where_warnings_are_errors(beside: Path):
    code = "import torch; print(torch.distributed.is_backend_available('smddp'))"
    done = python("-W", "error::RuntimeWarning", "-c", code, PYTHONPATH=str(beside))
    assert done.stdout == "True\n"


def test_no_import_warns_where_smddp_is_alone():
    done = python("-c", "import torch, smdistributed.dataparallel, smdistributed.modelparallel")
    assert not warnings(done)


def test_info_names_the_historic_package(beside: Path):
    found = json.loads(python("-m", "smddp", "info", "--json", PYTHONPATH=str(beside)).stdout)
    assert f"{NAME} 2.1 has files at the same paths" in found["surroundings"]["historic package"]
