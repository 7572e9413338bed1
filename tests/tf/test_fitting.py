"""`Model.fit` of 1 and 3 ranks."""

import pytest
from programs import cases, check


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", cases("fitting"))
def test_fitting(case, size):
    check("fitting", case, size)
