"""Cases: functions that every rank of a pool runs."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from typing import Any

import pytest

from ranks.pool import CASE_SECONDS, Pools

Case = Callable[[], None]


def on_ranks(*sizes: int, seconds: float = CASE_SECONDS) -> Callable[[Case], Any]:
    """Decorator: runs the function on each rank of a group, for each of the sizes."""

    def wrap(case: Case) -> Any:
        @pytest.mark.parametrize("size", sizes)
        def test(size: int, pools: Pools) -> None:
            pools.of(size).run(case.__module__, case.__name__, seconds)

        test.__name__ = case.__name__
        test.__doc__ = case.__doc__
        test.case = case
        test.sizes = sizes
        test.seconds = seconds
        return test

    return wrap


def case_names(directory: str) -> list[tuple[str, str]]:
    """(module, function) of every function `case_*` of the modules in `directory`.

    Reads the sources, so that collecting imports no torch.
    """
    found = []
    for name in sorted(os.listdir(directory)):
        if name.endswith(".py") and name != "__init__.py":
            with open(os.path.join(directory, name)) as source:
                tree = ast.parse(source.read())
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            found += [(name[:-3], n) for n in names if n.startswith("case_")]
    return found
