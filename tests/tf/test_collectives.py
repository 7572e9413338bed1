"""Calls on tensors and variables, of 1, 2 and 3 ranks."""

import pytest
from programs import cases, check


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", cases("collectives"))
def test_collectives(case, size):
    check("collectives", case, size)
