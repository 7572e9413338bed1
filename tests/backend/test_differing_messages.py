"""Messages that do not fit, messages where others make a collective, and calls on another group of the same ranks: who
waits is told at once, or at the deadline, and what each rank was in.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backend import calls, tally
from backend.calls import LARGE, SMALL, Call
from backend.messages import both, receives, sends
from backend.ranks import on_ranks
from backend.test_differing_calls import DEADLINE, SECONDS, make

#: Of calls whose difference shows only when the time is up.
SHORT = datetime.timedelta(seconds=1.5)


def told(kind: str, what: str, error: BaseException | None, *words: str) -> str | None:
    """Counts one pair of calls. Returns what is wrong: no error, or one without one of these patterns."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    named = error is not None and all(re.search(word, text) for word in words)
    tally.count(kind, error is not None, named)
    return None if named else f"{what} -> {text or 'nothing'}"


def check(missed: list[str | None]) -> None:
    dist.barrier()
    assert not any(missed), "\n".join(filter(None, missed))


def words_of(call: Call) -> str:
    """How the core tells of a message."""
    what, count, dtype, tag = call.key
    shown = rf"{count} elements of {str(dtype).removeprefix('torch.')}, {tag.replace('=', ' ')}"
    return rf"recv #\d+ from rank 0 \({shown}\)" if what == "recv" else rf"sends {shown}"


@on_ranks(2, 3, seconds=SECONDS)
def test_a_message_that_nobody_receives_is_told_of_at_the_end():
    missed = []
    for sent in (sends(SMALL), sends(0), sends(LARGE), sends(LARGE * 200, later=True)):
        for before in ((), (calls.all_reduce(SMALL),)):
            group = dist.new_group(timeout=DEADLINE)
            error = make(group, (*before, sent) if group.rank() == 0 else before, later=False)
            said = ("^MismatchError", r"rank 0 .*sent 1 message\(s\) to rank 1 .*asked for 0")
            missed.append(told("messages", f"{sent} after {len(before)} calls", error, *said))
    check(missed)


@on_ranks(2, 3, seconds=SECONDS)
def test_messages_of_different_sizes_types_or_tags_are_told_apart():
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
        said = ("^MismatchError", words_of(sent), words_of(received))
        missed.append(told("messages", f"{sent} | {received}", error, *said))
    check(missed)


@on_ranks(2, 3, seconds=SECONDS)
def test_batches_of_messages_that_differ_are_told_apart():
    missed = []
    for one, other in ((SMALL, SMALL + 1), (SMALL, LARGE), (LARGE, LARGE * 200)):
        group = dist.new_group(timeout=DEADLINE)
        mine = {0: (both(one),), 1: (both(other),)}.get(group.rank(), ())
        error = make(group, mine, later=False)
        # Whoever finds it first: one of the two messages.
        found = [
            rf"recv #\d+ from rank \d \({a} elements.* sends {b} elements" for a, b in ((one, other), (other, one))
        ]
        missed.append(told("messages", f"batch of {one} | {other}", error, "^MismatchError", "|".join(found)))
    check(missed)


def objects() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    """torch's calls for objects, and the collective that each begins with."""

    def gathered(group: Any) -> None:
        dist.all_gather_object([None] * group.size(), "word", group=group)

    def sent(group: Any) -> None:
        dist.broadcast_object_list(["word"], src=0, group=group)

    return {"all_gather_object": ("all_gather", gathered), "broadcast_object_list": ("broadcast", sent)}


@on_ranks(2, 3, seconds=SECONDS)
def test_calls_for_objects_are_told_apart_from_others():
    missed = []
    kinds = objects() | {
        "all_reduce": ("all_reduce", lambda group: calls.all_reduce(SMALL).make(group, False)),
        "barrier": ("barrier", lambda group: dist.barrier(group)),
    }
    for number, (usual, odd) in enumerate((a, b) for a in kinds for b in kinds if a != b):
        chosen = number % dist.get_world_size()
        group = dist.new_group(timeout=DEADLINE)

        def run(group, _, turn=(chosen, odd, usual)):
            rank, other, most = turn
            return kinds[other if group.rank() == rank else most][1](group), [], []

        call = Call((), "", run)
        words = [rf"calls {kinds[name][0]}\(" for name in (usual, odd)]
        missed.append(told("objects", f"{usual} | {odd}", make(group, (call,), False), "^MismatchError", *words))
    check(missed)


def on_two_groups(one: Call, other: Call, orders: tuple[tuple[int, ...], tuple[int, ...]]) -> list[str | None]:
    """Rank 0 makes `one` on the first of these groups, all others make `other`; then each its next."""
    groups = [dist.new_group(timeout=SHORT) for _ in range(2)]
    # What a rank is in is told by its process, which has to be out of new_group.
    dist.barrier()
    first = dist.get_rank() == 0
    mine, theirs, order = (one, other, orders[0]) if first else (other, one, orders[1])
    error: BaseException | None = None
    try:
        for index in order:
            mine.make(groups[index], False)
    except Exception as raised:
        error = raised
    # Nobody leaves while somebody waits: that would be another reason.
    dist.barrier()
    for group in groups:
        make(group, (), False)
    at, other_rank = (orders[1][0], 1) if first else (orders[0][0], 0)
    own = (
        "^CollectiveTimeoutError",
        rf"{mine.key[0]} #\d+ on group `{groups[order[0]].group_name}`.*rank {other_rank} ",
    )
    # Whose deadline has passed a moment earlier is out of that call.
    theirs_named = rf"{theirs.key[0]} #\d+ of group `{groups[at].group_name}`"
    both_named = rf"rank {other_rank} .*(but in {theirs_named}|and {theirs_named} failed)"
    what = f"{one} | {other} on {orders}"
    wrong = told("another group", what, error, *own, both_named)
    # Whoever is a moment later finds that the other has raised already.
    return [wrong if wrong and not all(re.search(word, wrong.partition(" -> ")[2]) for word in own) else None]


@on_ranks(2, 3, seconds=SECONDS)
def test_calls_on_another_group_end_at_the_deadline_and_name_what_each_rank_is_in():
    check(on_two_groups(calls.all_reduce(SMALL), calls.all_reduce(SMALL), ((0, 1), (1, 0))))


@pytest.mark.slow
@on_ranks(2, 3, seconds=SECONDS)
def test_any_calls_on_another_group_end_at_the_deadline_and_name_what_each_rank_is_in():
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
    """Rank 0 or 1 has a message for the other, all others a collective. Returns what each pair lacks on this rank."""
    missed = []
    collectives = [calls.all_reduce(SMALL), calls.all_gather([LARGE] * dist.get_world_size()), calls.barrier()]
    messages = [sends(SMALL), sends(LARGE * 200), receives(SMALL), both(SMALL)]
    for number, (message, collective) in enumerate((a, b) for a in messages for b in collectives):
        odd = number // 2 % 2
        group = dist.new_group(timeout=SHORT)
        error = make(group, (message if group.rank() == odd else collective,), later=False)
        words = (r"\b(send|recv|sent|sends) ", rf"\b{collective.key[0]}\b")
        wrong = told("messages and collectives", f"{message} | {collective}", error, *words)
        missed.append(wrong and (wrong if error is None else f"unnamed: {wrong}"))
        if group.rank() != odd:
            assert error is not None, f"{collective} ended well without rank {odd}"
    dist.barrier()
    return missed


@pytest.mark.slow
@on_ranks(2, 3, seconds=SECONDS)
def test_nobody_goes_on_from_a_collective_where_another_rank_has_a_message():
    # How many are told, and in which words, depends on the time that ranks have: docs/reliability.md counts it.
    for line in filter(None, messages_and_collectives()):
        print(line)
