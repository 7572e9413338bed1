"""Comparison of the record in tests/estimator/parity.json with the unmodified training toolkit: `make test-launch`."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("sagemaker_training", reason="sagemaker-training is not installed: make test-launch")
sys.path.insert(0, str(Path(__file__).parents[2] / "estimator"))
from parity_cases import CASES
from parity_record import RECORDED, toolkit


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_the_toolkits(tmp_path: Path, name: str):
    assert toolkit(sys.executable, name, tmp_path / "base") == RECORDED[name]
