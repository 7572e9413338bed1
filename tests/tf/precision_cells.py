"""The product of precision, accumulation, gradients, optimizer and training loop, and a sample of it."""

import itertools

#: precision: float32, or mixed_float16 with the LossScaleOptimizer added by compile, outside or inside.
DIMENSIONS = {
    "precision": ("float32", "auto", "outside", "inside"),
    "passes": (1, 2),
    "gradients": ("dense", "sparse", "sparse_as_dense"),
    "optimizer": ("SGD", "Adam", "legacy"),
    "loop": ("fit", "eager_fit", "function", "tape"),
}


def possible(cell: dict) -> bool:
    """compile adds a LossScaleOptimizer for fit alone; a tape neither accumulates nor is inside an optimizer."""
    if cell["loop"] == "tape" and (cell["passes"] > 1 or cell["precision"] == "inside"):
        return False
    return cell["precision"] != "auto" or cell["loop"] in ("fit", "eager_fit")


def product() -> list[dict]:
    rows = (dict(zip(DIMENSIONS, values)) for values in itertools.product(*DIMENSIONS.values()))
    return [row for row in rows if possible(row)]


def pairwise() -> list[dict]:
    """Few cells that hold every possible pair of values, both with and without Keras 2's legacy optimizers."""
    rows = product()
    legacy = [row for row in rows if row["optimizer"] == "legacy"]
    return [*_chosen([row for row in rows if row not in legacy]), *_chosen(legacy)]


def _chosen(rows: list[dict]) -> list[dict]:
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: dict) -> set:
    return set(itertools.combinations(row.items(), 2))


def name(cell: dict) -> str:
    """A test's id."""
    return "-".join(str(value) for value in cell.values())
