"""The whole matrix of pipelines over two backends, and their speed: every `case_*` of `slow_cases/`."""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names
from ranks.pool import client_pool

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = case_names(os.path.join(HERE, "slow_cases"))


@pytest.fixture(scope="module", params=["smddp", "gloo"])
def four(request):
    with client_pool(4, HERE, request.param) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(four, module, function):
    four.run(f"slow_cases.{module}", function, seconds=280.0)
