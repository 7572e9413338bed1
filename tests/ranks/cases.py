"""Cases: functions that every rank of a pool runs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from pathlib import Path
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


def case_names(directory: Path) -> list[tuple[str, str]]:
    """(module, function) of every function `case_*` of the modules in `directory`.

    Reads the sources, so that collecting imports no torch.
    """
    found = []
    for file in sorted(directory.glob("*.py")):
        names = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
        found += [(file.stem, name) for name in names if name.startswith("case_")]
    return found


def each_case(directory: Path, slow: Container[str] = ()) -> Callable[[Any], Any]:
    """Decorator: a test of every function `case_*` in the folder, with arguments `module` and `function`.

    slow: modules whose cases are marked slow.
    """
    found = [
        pytest.param(module, function, marks=[pytest.mark.slow] if module in slow else [])
        for module, function in case_names(directory)
    ]
    return pytest.mark.parametrize(("module", "function"), found, ids=lambda part: part.removeprefix("case_"))


def keeps_group(case: Case) -> Case:
    """Marks a case for `Pool.run` that runs in the pool's default group, which stays open for later cases."""
    case.case = case  # type: ignore[attr-defined]
    return case


class Cases(list[str]):
    """Decorator and list: the names of a module's cases that keep the group, as parameters of a test."""

    def __call__(self, case: Case) -> Case:
        self.append(case.__name__)
        return keeps_group(case)
