"""Mismatched calls raise a MismatchError with both calls on all ranks, at the latest when they destroy the group.

Each case is a pair of calls in a new group. One rank makes the second call, all others the first. The pairs are
generated from `calls`, so a new form or collective is compared with all others.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend import calls, mismatch_counts
from backend.calls import LARGE, SMALL, Call
from backend.naming import names_both

# Long enough for a busy machine; a detected mismatch does not wait for it.
DEADLINE = datetime.timedelta(seconds=20)
SECONDS = 280.0

F32, F64, F16, BF16, I32, U8 = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8
FLOAT_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
INTEGER_OPS = ("SUM", "BAND", "BOR", "BXOR")

Pair = tuple[Sequence[Call], Sequence[Call]]


def make(group: Any, sequence: Sequence[Call], later: bool) -> BaseException | None:
    """Makes the calls of this rank, then destroys the group. Returns the first error."""
    error: BaseException | None = None
    try:
        for call in sequence:
            work = call.make(group, later)
            if later and work is not None:
                work.wait()
    except Exception as raised:
        error = raised
    try:
        dist.destroy_process_group(group)
    except Exception as raised:
        error = error or raised
    return error


def shown(sequence: Sequence[Call]) -> str:
    """Returns the description of the last two calls."""
    return ("... " if len(sequence) > 2 else "") + " then ".join(map(str, sequence[-2:]))


def expect_mismatches(pairs: Sequence[Pair], members: Sequence[int] | None = None) -> None:
    """Runs the pairs on the ranks of `members`, by default all. Raises AssertionError with the unreported pairs."""
    import smddp

    members = list(range(dist.get_world_size())) if members is None else list(members)
    missed = []
    for number, (usual, odd) in enumerate(pairs):
        # The same rank for two successive cases, often a pair and its reverse.
        chosen = number // 2 % len(members)
        error: BaseException | None = None
        try:
            group = dist.new_group(members, timeout=DEADLINE)
        except smddp.MismatchError as raised:
            # A slow rank may still create the group when the others have detected the mismatch.
            error = raised
        if dist.get_rank() not in members:
            continue
        if error is None:
            mine = odd if group.rank() == chosen else usual
            error = make(group, mine, later=number // 2 // len(members) % 2 == 1)
        raised = isinstance(error, smddp.MismatchError)
        named = raised and names_both(str(error), usual, odd)
        mismatch_counts.count("collectives", raised, named)
        if not named:
            got = "nothing" if error is None else f"{type(error).__name__}: {str(error)[:400]}"
            missed.append(f"{number}: {shown(usual)} | rank {chosen}: {shown(odd)} -> {got}")
    dist.barrier()
    assert not missed, f"{len(missed)} of {len(pairs)} pairs raised no mismatch on this rank:\n" + "\n".join(missed)


def both_ways(pairs: Iterator[tuple[Call, Call]] | Sequence[tuple[Call, Call]]) -> list[Pair]:
    """Returns each pair in both orders, without pairs of equal calls."""
    return [
        ((first,), (second,))
        for one, other in pairs
        if one.key != other.key
        for first, second in ((one, other), (other, one))
    ]


def every_collective(count: int, size: int, dtype: torch.dtype = F32) -> list[Call]:
    """Returns each collective once, with equal blocks of `count` elements."""
    even = [count] * size
    return [
        calls.all_reduce(count, dtype),
        calls.reduce(count, 0, dtype),
        calls.broadcast(count, 0, dtype),
        calls.gather(count, 0, dtype),
        calls.scatter(count, 0, dtype),
        calls.all_gather(even, dtype),
        calls.reduce_scatter(even, dtype),
        calls.all_to_all(even, dtype),
    ]


def lists(size: int) -> list[list[int]]:
    """Returns lists of blocks with equal sums, the even one first."""
    return {
        2: [[2, 2], [1, 3], [3, 1], [0, 4]],
        3: [[2, 2, 2], [2, 1, 3], [2, 3, 1], [1, 2, 3], [0, 0, 6]],
    }.get(size) or [[2] * size, [1, 3] + [2] * (size - 2), [2] * (size - 2) + [3, 1], [0, 4] + [2] * (size - 2)]


def scaled(sizes: Sequence[int], scale: int) -> list[int]:
    return [each * scale for each in sizes]


def size_of_world() -> int:
    return dist.get_world_size()


@on_ranks(2, 3, seconds=SECONDS)
def test_different_collectives_raise_a_mismatch():
    size = size_of_world()
    pairs = []
    for count in (SMALL, LARGE):
        pairs += both_ways(itertools.combinations([*every_collective(count, size), calls.barrier()], 2))
    # with the same total of bytes
    pairs += both_ways(itertools.product([calls.all_reduce(SMALL * size)], every_collective(SMALL, size)))
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_different_types_raise_a_mismatch():
    size = size_of_world()
    pairs = []
    for count, dtypes in ((SMALL, (F64, F16, BF16, I32, U8)), (LARGE, (F64, I32))):
        for dtype in dtypes:
            pairs += both_ways(zip(every_collective(count, size), every_collective(count, size, dtype)))
    # with the same number of bytes
    pairs += both_ways(zip(every_collective(SMALL, size), every_collective(SMALL * 2, size, BF16)))
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_different_sizes_raise_a_mismatch():
    size = size_of_world()
    pairs = []
    for one, other in ((SMALL, SMALL + 1), (0, SMALL), (SMALL, LARGE), (LARGE, LARGE + 1)):
        pairs += both_ways(zip(every_collective(one, size), every_collective(other, size)))
    pairs += both_ways([(calls.coalesced([2, 3]), calls.coalesced([3, 2]))])
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_different_operations_raise_a_mismatch():
    size = size_of_world()
    pairs = []
    for dtype, ops in ((F32, FLOAT_OPS), (I32, INTEGER_OPS)):
        for one, other in itertools.combinations(ops, 2):
            pairs += both_ways(
                [
                    (calls.all_reduce(SMALL, dtype, one), calls.all_reduce(SMALL, dtype, other)),
                    (calls.reduce(SMALL, 0, dtype, one), calls.reduce(SMALL, 0, dtype, other)),
                    (
                        calls.reduce_scatter([SMALL] * size, dtype, one),
                        calls.reduce_scatter([SMALL] * size, dtype, other),
                    ),
                ]
            )
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_different_factors_raise_a_mismatch():
    size = size_of_world()
    pairs = []
    for count in (SMALL, LARGE):
        for one, other in itertools.combinations(("PREMUL_SUM:2", "PREMUL_SUM:3", "PREMUL_SUM:0.5", "SUM"), 2):
            pairs += both_ways(
                [
                    (calls.all_reduce(count, op=one), calls.all_reduce(count, op=other)),
                    (calls.reduce(count, op=one), calls.reduce(count, op=other)),
                    (calls.reduce_scatter([count] * size, op=one), calls.reduce_scatter([count] * size, op=other)),
                ]
            )
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_different_roots_raise_a_mismatch():
    pairs = []
    for count in (SMALL, LARGE, 0):
        for collective in (calls.broadcast, calls.reduce, calls.gather, calls.scatter):
            roots = itertools.combinations(range(size_of_world()), 2)
            pairs += both_ways((collective(count, one), collective(count, other)) for one, other in roots)
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_uneven_lists_of_one_sum_raise_a_mismatch():
    pairs = []
    for scale in (1, LARGE):
        for one, other in itertools.combinations(lists(size_of_world()), 2):
            one, other = scaled(one, scale), scaled(other, scale)
            for collective in (calls.all_gather, calls.reduce_scatter, calls.all_to_all):
                pairs += both_ways([(collective(one), collective(other))])
    expect_mismatches(pairs)


@on_ranks(3, seconds=SECONDS)
def test_a_reduce_scatter_of_which_one_rank_has_another_list_raise_a_mismatch():
    # Each rank makes the second call twice.
    expect_mismatches([((calls.reduce_scatter([2, 1, 3]),), (calls.reduce_scatter([2, 3, 1]),))] * 6)


@on_ranks(2, 3, seconds=SECONDS)
def test_a_list_and_a_tensor_that_differ_raise_a_mismatch():
    size = size_of_world()
    even, uneven = lists(size)[0], lists(size)[1:]
    pairs = []
    for other in uneven:
        pairs += both_ways(
            [
                (calls.all_gather(even, form="tensor"), calls.all_gather(other)),
                (calls.reduce_scatter(even, form="tensor"), calls.reduce_scatter(other)),
                (calls.all_to_all(even, form="even"), calls.all_to_all(other)),
                (calls.all_to_all(even, form="even"), calls.all_to_all(other, form="splits")),
                (calls.all_to_all(even), calls.all_to_all(other, form="splits")),
            ]
        )
    expect_mismatches(pairs)


@on_ranks(2, 3, seconds=SECONDS)
def test_the_same_calls_in_another_order_raise_a_mismatch():
    size = size_of_world()
    some = [*every_collective(SMALL, size), calls.broadcast(SMALL, 1), calls.all_reduce(SMALL, op="MAX")]
    expect_mismatches([((one, other), (other, one)) for one, other in itertools.combinations(some, 2)])


@on_ranks(2, 3, seconds=SECONDS)
def test_a_difference_after_right_calls_raise_a_mismatch():
    size = size_of_world()
    right = every_collective(SMALL, size)
    expect_mismatches(
        [
            ((*right, one), (*right, other))
            for one, other in (
                (calls.broadcast(SMALL, 0), calls.broadcast(SMALL, 1)),
                (calls.gather(SMALL, 0), calls.gather(SMALL, 1)),
                (calls.reduce_scatter(lists(size)[1]), calls.reduce_scatter(lists(size)[2])),
                (calls.all_reduce(SMALL, op="PREMUL_SUM:2"), calls.all_reduce(SMALL, op="PREMUL_SUM:3")),
            )
        ]
    )


@on_ranks(3, seconds=SECONDS)
def test_calls_that_differ_in_a_group_of_some_ranks_raise_a_mismatch():
    even = [SMALL, SMALL]
    pairs = both_ways(itertools.combinations(every_collective(SMALL, 2), 2))
    pairs += both_ways(
        (collective(SMALL, 0), collective(SMALL, 1))
        for collective in (calls.broadcast, calls.reduce, calls.gather, calls.scatter)
    )
    pairs += both_ways(
        (collective(even), collective([SMALL - 1, SMALL + 1]))
        for collective in (calls.all_gather, calls.reduce_scatter, calls.all_to_all)
    )
    expect_mismatches(pairs, members=[0, 2])
