"""Pipelines on four ranks: every `case_*` of `pipeline_cases/`, run by one pool."""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = case_names(os.path.join(HERE, "pipeline_cases"))


@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(ranks, module, function):
    ranks.run(f"pipeline_cases.{module}", function)
