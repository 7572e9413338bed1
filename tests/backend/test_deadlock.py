"""Deadlocks are errors that name the cycle; slow ranks are not."""

from __future__ import annotations

import random

import pytest
from ranks.group import BACKEND
from ranks.pool import Pool

from backend import deadlock_cases

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="other backends detect no deadlocks")
MODULE = "backend.deadlock_cases"
ERROR = {"SMDDP_DEADLOCK": "error"}

#: Cycles of each size, number of groups, kind and form at least once.
SAMPLE = [
    (2, 2, "all_reduce", "blocking"),
    (3, 3, "mixed", "async"),
    (4, 2, "recv", "blocking"),
    (5, 5, "barrier", "async"),
    (6, 4, "send", "blocking"),
    (7, 3, "broadcast", "blocking"),
    (8, 5, "mixed", "blocking"),
    (2, 2, "all_to_all", "async"),
    (3, 2, "send", "async"),
]


@pytest.fixture(scope="module")
def pool():
    with Pool(8, lambda rank: ERROR) as made:
        yield made


def test_each_rank_of_a_cycle_raises_the_whole_cycle_with_python_lines(pool):
    pool.run(MODULE, "cycles", 170, chosen=SAMPLE)


def test_cycle_between_nodes_is_found():
    with Pool(4, lambda rank: {"SMDDP_NODE": f"node{rank // 2}", **ERROR}) as made:
        made.run(MODULE, "cycles", 120, chosen=[(4, 4, "mixed", "blocking"), (3, 2, "recv", "async")])


def test_encrypted_cycle_between_nodes_is_found():
    with Pool(2, lambda rank: {"SMDDP_NODE": f"node{rank}", "SMDDP_ENCRYPT": "1", **ERROR}) as made:
        made.run(MODULE, "cycles", 120, chosen=[(2, 2, "all_reduce", "blocking")])


def test_slow_ranks_are_no_deadlock():
    with Pool(4, lambda rank: ERROR) as made:
        made.run(MODULE, "slow_ranks", 100, duration=10.0, seed=random.randrange(1 << 30))


def test_thread_in_user_code_ends_a_probe(pool):
    pool.run(MODULE, "another_thread_makes_the_call", 60)


def test_call_with_a_short_deadline_ends_at_it(pool):
    pool.run(MODULE, "short_deadline_is_kept", 60)


def test_messages_with_short_deadlines_end_at_them():
    with Pool(2, lambda rank: ERROR) as made:
        made.run(MODULE, "message_deadlines_are_kept", 60)


def test_default_only_logs_the_cycle(tmp_path):
    log = tmp_path / "log.%p"
    with Pool(2, lambda rank: {"SMDDP_DEBUG_FILE": str(log)}) as made:
        made.run(MODULE, "reported_cycle_continues_to_its_deadline", 60)
    texts = [file.read_text() for file in tmp_path.glob("log.*")]
    assert len(texts) == 2 and all(text.count("possible deadlock of 2 ranks: rank ") == 1 for text in texts), texts


@pytest.mark.parametrize("case", ["new_thread_sends", "callback_sends", "signal_handler_sends"])
def test_call_that_other_code_makes_later_ends_the_wait(case):
    with Pool(2) as made:
        made.run(MODULE, case, 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("form", deadlock_cases.FORMS)
def test_all_cycles_are_found(form, nodes):
    with Pool(8, lambda rank: {"SMDDP_NODE": f"node{rank % nodes}", **ERROR}) as made:
        for chosen in deadlock_cases.parameters():
            if chosen[3] == form:
                made.run(MODULE, "cycles", 60, chosen=[chosen])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_calls_with_random_delays_are_no_deadlock():
    with Pool(4, lambda rank: ERROR) as made:
        made.run(MODULE, "slow_ranks", 3000, duration=2400.0, seed=random.randrange(1 << 30))
