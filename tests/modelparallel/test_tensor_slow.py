"""Tensor parallelism on eight ranks over two backends: every `case_*` of `tensor_slow_cases/`."""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = case_names(os.path.join(HERE, "tensor_slow_cases"))


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def eight(request):
    with client_pool(8, HERE, request.param) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(eight, module, function, tmp_path):
    eight.run(f"tensor_slow_cases.{module}", function, seconds=280.0, directory=str(tmp_path))
