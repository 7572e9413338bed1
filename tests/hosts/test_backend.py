"""The backend's own test-suite, and torch's clients, with ranks that live in several hosts.

A case that is for groups of exactly so many ranks gets them, two always in two hosts; a case that is for any number
runs with all four ranks, and with three where that makes hosts of unequal size.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hosts.pool import Labs

SHAPES = [(2, 2), (4, 1)]
CLIENTS = {"fsdp2", "fsdp1", "ddp", "tensor_parallel", "zero"}
_TESTS = Path(__file__).parents[1]

# (shape, case): what one machine promises and hosts of several ranks cannot.
NOT_ACROSS = {
    (
        (2, 2),
        "test_half_precision_sums_round_once",
    ): "across hosts sums round once a level; hosts/cases.py has that case",
}

# One of each kind: what `make test` runs.
QUICK = {
    "test_all_gather_into_tensor_puts_each_block_in_its_place",
    "test_all_to_all_single_takes_uneven_splits_and_shaped_rows",
    "test_all_reduce_reduces_every_type_by_every_operation",
    "test_reduce_scatter_gives_each_rank_its_block",
    "test_messages_go_round_in_every_type_and_size",
    "test_overlapping_groups_work_side_by_side",
    "test_objects_travel",
    "case_one_dimension",
    "case_hsdp",
}


def _sizes(sizes: tuple[int, ...], shape: tuple[int, int]) -> list[int]:
    several = [size for size in sizes if size > 1]
    if len(several) == 1:
        return several
    return [3, 4] if shape == (2, 2) else [4]


def _mark(shape: tuple[int, int], name: str) -> list[pytest.MarkDecorator]:
    return [] if shape == (2, 2) and name in QUICK else [pytest.mark.slow]


def backend_cases() -> list:
    """(shape, module, case, ranks, seconds); one shape after the other, and one number of ranks after the other."""
    found = []
    for file in sorted((_TESTS / "backend").glob("test_*.py")):
        module = importlib.import_module(f"backend.{file.stem}")
        for name, test in vars(module).items():
            if hasattr(test, "case"):
                found += [
                    (shape, f"backend.{file.stem}", name, size, test.seconds)
                    for shape in SHAPES
                    for size in _sizes(test.sizes, shape)
                ]
    found.sort(key=lambda row: (SHAPES.index(row[0]), row[3]))
    return [
        pytest.param(*row, marks=_mark(row[0], row[2]), id=f"{row[0][0]}x{row[0][1]}-{row[2]}-{row[3]}")
        for row in found
    ]


def client_cases() -> list:
    from clients.test_clients import NOT_UNDER, cases

    found = []
    for shape in SHAPES:
        for param in cases():
            module, function = param.values
            if module in CLIENTS:
                mark = _mark(shape, function if module == "fsdp2" else "")
                found.append(
                    pytest.param(
                        shape, module, function, NOT_UNDER, marks=mark, id=f"{shape[0]}x{shape[1]}-{module}-{function}"
                    )
                )
    return found


@pytest.mark.parametrize(("shape", "module", "name", "size", "seconds"), backend_cases())
def test_backend(labs: Labs, shape, module, name, size, seconds) -> None:
    if reason := NOT_ACROSS.get((shape, name)):
        pytest.skip(reason)
    labs.of(*shape).run_backend_case(module, name, size, seconds)


@pytest.mark.parametrize("name", ["nodes_are_the_hosts", "half_precision_sums_round_once_a_level"])
@pytest.mark.parametrize(
    "shape", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_across_hosts(labs: Labs, backend, shape, name) -> None:
    if backend != "smddp":
        pytest.skip("the promise is smddp's own")
    labs.of(*shape).run_backend_case("hosts.cases", name, 4, 60.0)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("shape", "module", "function", "not_under"), client_cases())
def test_client(labs: Labs, backend, shape, module, function, not_under) -> None:
    for name in (function, "*"):
        if reason := not_under.get((backend, module, name)):
            pytest.skip(reason)
    labs.of(*shape).run_client_case(f"cases.{module}", function, 90.0)
