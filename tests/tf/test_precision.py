"""Mixed precision x wrapping order x accumulation x sparse gradients x optimizer x training loop, on 2 ranks."""

import precision_cells
import pytest
from programs import results, verdict

SAMPLE = tuple(precision_cells.name(cell) for cell in precision_cells.pairwise())
WHOLE = {
    loop: tuple(precision_cells.name(cell) for cell in precision_cells.product() if cell["loop"] == loop)
    for loop in precision_cells.DIMENSIONS["loop"]
}


@pytest.mark.parametrize("case", SAMPLE)
def test_training_equals_one_process(case):
    verdict(results("precision", 2, SAMPLE), case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "case"), [(loop, case) for loop, cases in WHOLE.items() for case in cases])
def test_training_equals_one_process_in_the_whole_product(loop, case):
    verdict(results("precision", 2, WHOLE[loop]), case, 2)
