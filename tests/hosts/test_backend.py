"""The backend's own test-suite, and torch's clients, with ranks that live in several hosts.

A case that is for groups of exactly so many ranks gets them, two always in two hosts; a case that is for any number
runs with all four ranks, and with three where that makes hosts of unequal size.
"""

from __future__ import annotations

import pytest
from backend.every_case import ONE_NODE, all_cases, sizes_across
from ranks.cases import case_names

from hosts.pool import Labs
from hosts.wires import WIRES

SHAPES = [(2, 2), (4, 1)]
# (wire, hosts, processes on each)
LABS = [(wire, *shape) for wire in WIRES for shape in SHAPES]
CLIENTS = {"fsdp2", "fsdp1", "ddp", "tensor_parallel", "zero"}

# (shape, case): guarantees of one machine that several hosts cannot give.
NOT_ACROSS = {
    (
        (2, 2),
        "test_half_precision_sums_round_once",
    ): "across hosts sums round once a level; hosts/cases.py has that case",
}

# Cases of `make test` on two hosts with two ranks each: one per kind, and the transfers over libfabric.
QUICK = {}
QUICK["tcp"] = {
    "test_all_gather_into_tensor_puts_each_block_in_its_place",
    "test_all_to_all_single_takes_uneven_splits_and_shaped_rows",
    "test_all_reduce_reduces_every_type_by_every_operation",
    "test_reduce_scatter_gives_each_rank_its_block",
    "test_messages_go_round_in_every_type_and_size",
    "test_overlapping_groups_work_side_by_side",
    "test_a_destroyed_group_that_is_still_referenced_has_no_connection",
    "test_overlapping_input_and_output_give_the_results_of_separate_tensors",
    "test_objects_travel",
    "case_one_dimension",
    "case_hsdp",
    "nodes_are_the_hosts",
    "half_precision_sums_round_once_a_level",
    "status_names_the_late_rank_from_each_host",
}
QUICK["fabric"] = {
    "test_all_gather_into_tensor_puts_each_block_in_its_place",
    "test_all_to_all_single_takes_uneven_splits_and_shaped_rows",
    "test_large_and_empty_reductions",
    "test_messages_go_round_in_every_type_and_size",
    "test_overlapping_groups_work_side_by_side",
    "case_one_dimension",
    "nodes_are_the_hosts",
}


def _param(lab: tuple[str, int, int], *values, name: str):
    wire, hosts, procs = lab
    quick = (hosts, procs) == SHAPES[0] and name in QUICK[wire]
    words = [f"{wire}-{hosts}x{procs}", name, *(str(v) for v in values if isinstance(v, int))]
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(lab, *values, marks=marks, id="-".join(words))


def backend_cases() -> list:
    """(lab, module, case, seconds, ranks); one number of ranks after the other."""
    found = []
    for lab in LABS:
        for module, name, test in all_cases():
            sizes = sizes_across(test.sizes, [3, 4] if lab[1:] == (2, 2) else [4])
            found += [(size, lab, module, name, test.seconds) for size in sizes]
    found.sort(key=lambda row: (LABS.index(row[1]), row[0]))
    return [_param(lab, module, name, seconds, size, name=name) for size, lab, module, name, seconds in found]


def client_cases() -> list:
    from clients.test_clients import CASES

    modules = [case for case in case_names(CASES) if case[0] in CLIENTS]
    return [
        # Other modules' cases have the same names.
        _param(lab, module, function, name=function if module == "fsdp2" else f"{module}-{function}")
        for lab in LABS
        for module, function in modules
    ]


@pytest.mark.parametrize(("lab", "module", "name", "seconds", "size"), backend_cases())
def test_backend(labs: Labs, lab, module, name, seconds, size) -> None:
    if reason := ONE_NODE.get(name) or NOT_ACROSS.get((lab[1:], name)):
        pytest.skip(reason)
    labs.of(*lab).run(module, name, size, seconds)


@pytest.mark.parametrize(
    ("lab", "name"),
    [
        _param(lab, name, name=name)
        for lab in LABS
        for name in (
            "nodes_are_the_hosts",
            "half_precision_sums_round_once_a_level",
            "status_names_the_late_rank_from_each_host",
        )
    ],
)
def test_across_hosts(labs: Labs, backend, lab, name) -> None:
    if backend != "smddp":
        pytest.skip("the promise is smddp's own")
    labs.of(*lab).run("hosts.cases", name, 4, 60.0)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("lab", "module", "function"), client_cases())
def test_client(labs: Labs, backend, lab, module, function) -> None:
    from clients.test_clients import NOT_UNDER

    for name in (function, "*"):
        if reason := NOT_UNDER.get((backend, module, name)):
            pytest.skip(reason)
    labs.of(*lab).run(f"cases.{module}", function, 4, 90.0)
