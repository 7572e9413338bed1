"""Training loops of 1 and 3 ranks; of 4 on two hosts in `test_hosts.py`."""

import pytest
from programs import cases, check


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", cases("training"))
def test_training(case, size):
    check("training", case, size)
