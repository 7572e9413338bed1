"""The whole matrix of pipelines over two backends, and their speed: every `case_*` of `slow_cases/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.cases import each_case
from ranks.pool import client_pool

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def four(request):
    with client_pool(4, HERE, request.param) as pool:
        yield pool


@pytest.mark.slow
@each_case(HERE / "slow_cases")
def test_case(four, module, function):
    four.run(f"slow_cases.{module}", function, seconds=280.0)
