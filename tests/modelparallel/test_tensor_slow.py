"""Tensor parallelism on eight ranks over two backends: every `case_*` of `tensor_slow_cases/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.cases import each_case
from ranks.pool import client_pool

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def eight(request):
    with client_pool(8, HERE, request.param) as pool:
        yield pool


@pytest.mark.slow
@each_case(HERE / "tensor_slow_cases")
def test_case(eight, module, function, tmp_path):
    eight.run(f"tensor_slow_cases.{module}", function, seconds=280.0, directory=str(tmp_path))
