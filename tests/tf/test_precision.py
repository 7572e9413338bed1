"""Mixed precision x wrapping order x accumulation x sparse gradients x optimizer x training loop, on 2 ranks."""

import precision_cells
import pytest
from programs import results, verdict

SAMPLE = tuple(precision_cells.name(cell) for cell in precision_cells.pairwise())


def launches() -> list[tuple[str, ...]]:
    """The whole product in launches of at most 18 cells, each within the time limit of a test."""
    parts: dict[tuple, list[str]] = {}
    for cell in precision_cells.product():
        parts.setdefault((cell["loop"], cell["precision"]), []).append(precision_cells.name(cell))
    return [tuple(part) for part in parts.values()]


@pytest.mark.parametrize("case", SAMPLE)
def test_training_equals_one_process(case):
    verdict(results("precision", 2, SAMPLE), case, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cells", "case"), [pytest.param(cells, case, id=case) for cells in launches() for case in cells]
)
def test_training_equals_one_process_in_the_whole_product(cells, case):
    verdict(results("precision", 2, cells), case, 2)
