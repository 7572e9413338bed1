"""Ranks, objects, optimizer and checkpoints on four ranks: every `case_*` of `front_cases/`, run by one pool."""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = case_names(os.path.join(HERE, "front_cases"))


@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(ranks, module, function, tmp_path):
    ranks.run(f"front_cases.{module}", function, directory=str(tmp_path))
