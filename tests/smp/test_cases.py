"""`torch.sagemaker` on four ranks: every function `case_*` of the modules in `smp_cases/`, run by one pool of ranks.

SMDDP_TEST_BACKEND names the backend (default: smddp).
"""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names

HERE = os.path.dirname(os.path.abspath(__file__))
# Modules whose imports alone take long on two cores.
SLOW = ("trainer_tensor_parallel",)
CASES = [
    pytest.param(module, function, marks=[pytest.mark.slow] if module in SLOW else [])
    for module, function in case_names(os.path.join(HERE, "smp_cases"))
]


@pytest.mark.parametrize(("module", "function"), CASES, ids=lambda part: part.removeprefix("case_"))
def test_case(ranks, module, function):
    ranks.run(f"smp_cases.{module}", function, seconds=180.0)
