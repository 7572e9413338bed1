"""`Model.fit` of 1, 2 and 4 ranks."""

import pytest
from programs import cases, check


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", cases("fitting"))
def test_fitting(case, size):
    check("fitting", case, size)
