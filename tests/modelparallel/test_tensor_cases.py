"""Tensor parallelism on four ranks, with stages and with replicas: every `case_*` of `tensor_cases/`."""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = case_names(os.path.join(HERE, "tensor_cases"))


@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(ranks, module, function, tmp_path):
    ranks.run(f"tensor_cases.{module}", function, directory=str(tmp_path))
