"""Faster placement search of DTensor, which tries the operands' placements first.

For the first operation on each shape torch evaluates every combination of placements over all mesh dimensions: 0.1 s of
CPU time with three dimensions. A combination without redistribution costs nothing and always wins, so this search tries
the operands' placements first, and all combinations only if that fails.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any


def install() -> None:
    """Patches this process; does nothing if this torch has no such search."""
    from torch.distributed.tensor._ops import utils

    search = getattr(utils, "expand_to_full_mesh_op_strategy", None)
    if search is None or hasattr(search, "__wrapped__"):
        return

    @functools.wraps(search)
    def own_first(mesh: Any, op_schema: Any, single_mesh_dim_strategies: list, **options: Any) -> Any:
        everything = functools.partial(search, mesh, op_schema, **options)
        operands = [strategy.strategies[0].output_spec for strategy in op_schema.args_strategy]
        partial = any(placement.is_partial() for spec in operands for placement in spec.placements)
        if mesh.ndim > 1 and operands and not partial and all(spec.mesh == mesh for spec in operands):
            first = options.get("input_index", 1)
            current = list(zip(*(spec.placements for spec in operands)))  # per mesh dimension
            own = [each for each in single_mesh_dim_strategies if tuple(each[first : first + len(operands)]) in current]
            with contextlib.suppress(RuntimeError):  # none of them is valid
                found = everything(own)
                if any(_same(spec, operands) for spec in found.strategies):
                    return found
        return everything(single_mesh_dim_strategies)

    utils.expand_to_full_mesh_op_strategy = own_first


def _same(found: Any, operands: list) -> bool:
    return all(mine.placements == spec.placements for mine, spec in zip(operands, found.input_specs))
