"""Mismatched messages, messages against collectives, and calls on another group of the same ranks.

The waiting ranks raise immediately or at the deadline, and the error names the call of each rank.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.cases import on_ranks

from backend import calls, mismatch_counts
from backend.calls import LARGE, SMALL, Call
from backend.messages import both, receives, sends
from backend.test_differing_calls import DEADLINE, SECONDS, make

#: Timeout of calls whose mismatch is detected only at the deadline.
SHORT = datetime.timedelta(seconds=1.5)


def missing(kind: str, what: str, error: BaseException | None, *words: str) -> str | None:
    """Counts one pair of calls. Returns a description of a missing error or a missing pattern."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    named = error is not None and all(re.search(word, text) for word in words)
    mismatch_counts.count(kind, error is not None, named)
    return None if named else f"{what} -> {text or 'nothing'}"


def check(missed: list[str | None]) -> None:
    dist.barrier()
    assert not any(missed), "\n".join(filter(None, missed))


def words_of(call: Call) -> str:
    """Returns the pattern of the core's description of a message."""
    what, count, dtype, tag = call.key
    shown = rf"{count} elements of {str(dtype).removeprefix('torch.')}, {tag.replace('=', ' ')}"
    return rf"recv #\d+ from rank 0 \({shown}\)" if what == "recv" else rf"sends {shown}"


@on_ranks(2, 3, seconds=SECONDS)
def test_an_unreceived_message_is_reported_when_the_group_ends():
    missed = []
    for sent in (sends(SMALL), sends(0), sends(LARGE), sends(LARGE * 200, later=True)):
        for before in ((), (calls.all_reduce(SMALL),)):
            group = dist.new_group(timeout=DEADLINE)
            error = make(group, (*before, sent) if group.rank() == 0 else before, later=False)
            patterns = ("^MismatchError", r"rank 0 .*sent 1 message\(s\) to rank 1 .*posted 0 recv")
            missed.append(missing("messages", f"{sent} after {len(before)} calls", error, *patterns))
    check(missed)


@on_ranks(2, 3, seconds=SECONDS)
def test_messages_of_different_sizes_types_or_tags_raise_a_mismatch():
    missed = []
    for sent, received in (
        (sends(SMALL), receives(SMALL + 1)),
        (sends(SMALL + 1), receives(SMALL)),
        (sends(SMALL), receives(LARGE)),
        (sends(LARGE), receives(SMALL)),
        (sends(LARGE * 200), receives(LARGE)),
        (sends(SMALL), receives(SMALL, dtype=torch.float64)),
        (sends(SMALL), receives(SMALL, dtype=torch.int32)),
        (sends(LARGE), receives(LARGE, dtype=torch.bfloat16)),
        (sends(LARGE * 200), receives(LARGE * 200, dtype=torch.float64)),
        (sends(SMALL, tag=1), receives(SMALL, tag=2)),
    ):
        group = dist.new_group(timeout=DEADLINE)
        mine = {0: (sent,), 1: (received,)}.get(group.rank(), ())
        error = make(group, mine, later=False)
        patterns = ("^MismatchError", words_of(sent), words_of(received))
        missed.append(missing("messages", f"{sent} | {received}", error, *patterns))
    check(missed)


@on_ranks(2, 3, seconds=SECONDS)
def test_batches_of_messages_that_differ_raise_a_mismatch():
    missed = []
    for one, other in ((SMALL, SMALL + 1), (SMALL, LARGE), (LARGE, LARGE * 200)):
        group = dist.new_group(timeout=DEADLINE)
        mine = {0: (both(one),), 1: (both(other),)}.get(group.rank(), ())
        error = make(group, mine, later=False)
        # The rank that detects it first names one of the two messages.
        found = [
            rf"recv #\d+ from rank \d \({a} elements.* sends {b} elements" for a, b in ((one, other), (other, one))
        ]
        missed.append(missing("messages", f"batch of {one} | {other}", error, "^MismatchError", "|".join(found)))
    check(missed)


def objects() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """Returns torch's calls for objects, and the first collective of each."""

    def gathered(group: Any) -> None:
        dist.all_gather_object([None] * group.size(), "word", group=group)

    def sent(group: Any) -> None:
        dist.broadcast_object_list(["word"], src=0, group=group)

    return {"all_gather_object": ("all_gather", gathered), "broadcast_object_list": ("broadcast", sent)}


@on_ranks(2, 3, seconds=SECONDS)
def test_calls_for_objects_raise_a_mismatch_with_others():
    missed = []
    kinds = objects() | {
        "all_reduce": ("all_reduce", lambda group: calls.all_reduce(SMALL).make(group, False)),
        "barrier": ("barrier", lambda group: dist.barrier(group)),
    }
    for number, (usual, odd) in enumerate((a, b) for a in kinds for b in kinds if a != b):
        chosen = number % dist.get_world_size()
        group = dist.new_group(timeout=DEADLINE)

        def run(group, _, case=(chosen, odd, usual)):
            rank, other, most = case
            return kinds[other if group.rank() == rank else most][1](group), [], []

        call = Call((), "", run)
        words = [rf"calls {kinds[name][0]}\(" for name in (usual, odd)]
        missed.append(missing("objects", f"{usual} | {odd}", make(group, (call,), False), "^MismatchError", *words))
    check(missed)


def on_two_groups(one: Call, other: Call, orders: tuple[tuple[int, ...], tuple[int, ...]]) -> list[str | None]:
    """Rank 0 makes `one` on two groups in its order, all other ranks make `other` in theirs."""
    groups = [dist.new_group(timeout=SHORT) for _ in range(2)]
    # Each process reports its current call, so it must have returned from new_group.
    dist.barrier()
    first = dist.get_rank() == 0
    mine, theirs, order = (one, other, orders[0]) if first else (other, one, orders[1])
    error: BaseException | None = None
    try:
        for index in order:
            mine.make(groups[index], False)
    except Exception as raised:
        error = raised
    # No rank leaves while another waits: that would be a different error.
    dist.barrier()
    for group in groups:
        make(group, (), False)
    at, other_rank = (orders[1][0], 1) if first else (orders[0][0], 0)
    own = (
        "^CollectiveTimeoutError",
        rf"{mine.key[0]} #\d+ on group `{groups[order[0]].group_name}`.*rank {other_rank} ",
    )
    # The other rank has left the call if its deadline expired earlier.
    theirs_named = rf"{theirs.key[0]} #\d+ of group `{groups[at].group_name}`"
    both_named = rf"rank {other_rank} .*(but in {theirs_named}|and {theirs_named} failed)"
    what = f"{one} | {other} on {orders}"
    wrong = missing("another group", what, error, *own, both_named)
    # A slightly later rank finds that the other has already raised.
    return [wrong if wrong and not all(re.search(word, wrong.partition(" -> ")[2]) for word in own) else None]


@on_ranks(2, 3, seconds=SECONDS)
def test_calls_on_another_group_time_out_and_name_each_ranks_call():
    check(on_two_groups(calls.all_reduce(SMALL), calls.all_reduce(SMALL), ((0, 1), (1, 0))))


@pytest.mark.slow
@on_ranks(2, 3, seconds=SECONDS)
def test_all_pairs_of_calls_on_another_group_time_out_and_name_each_ranks_call():
    size = dist.get_world_size()
    some = [
        calls.all_reduce(SMALL),
        calls.all_gather([LARGE] * size),
        calls.all_to_all([SMALL] * size),
        calls.barrier(),
    ]
    missed = []
    for one in some:
        for other in some:
            for orders in (((0,), (1,)), ((1, 0), (0, 1))):
                missed += on_two_groups(one, other, orders)
    check(missed)


def messages_and_collectives() -> list[str | None]:
    """Rank 0 or 1 makes a message, all others a collective. Returns the missing errors on this rank."""
    missed = []
    collectives = [calls.all_reduce(SMALL), calls.all_gather([LARGE] * dist.get_world_size()), calls.barrier()]
    messages = [sends(SMALL), sends(LARGE * 200), receives(SMALL), both(SMALL)]
    for number, (message, collective) in enumerate((a, b) for a in messages for b in collectives):
        odd = number // 2 % 2
        group = dist.new_group(timeout=SHORT)
        error = make(group, (message if group.rank() == odd else collective,), later=False)
        words = (r"\b(send|recv|sent|sends) ", rf"\b{collective.key[0]}\b")
        wrong = missing("messages and collectives", f"{message} | {collective}", error, *words)
        missed.append(wrong and (wrong if error is None else f"unnamed: {wrong}"))
        if group.rank() != odd:
            assert error is not None, f"{collective} ended well without rank {odd}"
    dist.barrier()
    return missed


@pytest.mark.slow
@on_ranks(2, 3, seconds=SECONDS)
def test_a_collective_never_completes_against_a_message():
    # The number and words of the reports depend on timing; docs/results/faults.md has the counts.
    for line in filter(None, messages_and_collectives()):
        print(line)
