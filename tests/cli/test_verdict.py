"""`smddp status` names the call that waits and the rank that it waits for: situations made by hand."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest
from smddp.observability import dumps, jobs, verdict
from smddp.observability.jobs import Job, Member

READS = "job.py:6 in read_batch < job.py:9 in main"
STEPS = "job.py:12 in step < job.py:9 in main"


def collective(
    seq: int, seconds: float = 154.0, name: str = "all_reduce", call: str = "", **changes: Any
) -> dict[str, Any]:
    what = f"{name} #{seq}"
    found = {"seq": seq, "what": what, "call": call or f"{name}(1 element)", "seconds": seconds, "message": None}
    return {**found, **changes}


def message(sends: bool, peer: int | None, seconds: float = 20.0, tag: int = 0, **changes: Any) -> dict[str, Any]:
    name, to = ("send", "to") if sends else ("recv", "from")
    what = f"{name} #0 {to} {'any rank' if peer is None else f'rank {peer}'}"
    label = {"sends": sends, "peer": peer, "tag": tag}
    return {"seq": 0, "what": what, "call": f"{what}, tag {tag}", "seconds": seconds, "message": label, **changes}


WAITED: dict[str, Any] = {"waits": True, "waited_seconds": None}
POSTED: dict[str, Any] = {"waits": False, "waited_seconds": None}


def member(name: str, rank: int, size: int, *calls: dict[str, Any], begun: int = 61, **changes: Any) -> dict[str, Any]:
    """The dump of a group. begun: number of collectives that the rank has begun."""
    present = max(calls, key=lambda call: call["seconds"], default=None)
    return {
        "name": name,
        "id": f"id of {name}",
        "rank": rank,
        "size": size,
        "error": None,
        "submitted": begun,
        "finished": begun,
        "recorded": True,
        "present": present,
        "pending": list(calls),
        **changes,
    }


def process(rank: int, *groups: dict[str, Any], at: str = STEPS, host: str = "") -> dict[str, Any]:
    host = host or "ab"[rank // 2 % 2]
    return {"host": host, "pid": 4711 + rank, "rank": rank, "process": f"{rank:016x}", "at": at, "groups": list(groups)}


def waiting(rank: int, size: int = 3, name: str = "dp", **changes: Any) -> dict[str, Any]:
    """A rank in all_reduce #61."""
    return process(rank, member(name, rank, size, collective(61), begun=62), **changes)


def away(rank: int, size: int = 3, name: str = "dp", **changes: Any) -> dict[str, Any]:
    """A rank that has finished #60 and begun nothing since."""
    return process(rank, member(name, rank, size), **{"at": READS, **changes})


def sentences(*processes: dict[str, Any], threshold: float = 5.0, job: Job | None = None) -> list[str]:
    return verdict.of(job or Job(list(processes)), threshold).sentences


def with_silent(reason: str, *processes: dict[str, Any], rank: int = 1, size: int = 3) -> Job:
    """A job in which one rank of group `dp` did not answer."""
    job = Job(list(processes))
    job.add_group("id of dp", {at: Member("ab"[at // 2 % 2], 4711 + at) for at in range(size)})
    job.add_silent(job.members["id of dp"][rank], reason)
    return job


AWAY = "rank 2 (host b, pid 4713), which is in read_batch at job.py:6"


def test_rank_in_user_code_is_named_with_its_line():
    assert sentences(waiting(0), waiting(1), away(2)) == [f"all_reduce #61 of group `dp` has waited 154 s for {AWAY}"]


def test_stopped_rank_is_named():
    job = with_silent("stopped (by a signal or a debugger)", waiting(0), waiting(2))
    name = "rank 1 (host a, pid 4712), which is stopped (by a signal or a debugger)"
    assert sentences(job=job) == [f"all_reduce #61 of group `dp` has waited 154 s for {name}"]


def test_process_without_an_answer_is_named_with_the_reason():
    (text,) = sentences(job=with_silent("its host does not respond", waiting(0), waiting(2)))
    assert text.endswith("for rank 1 (host a, pid 4712), which does not answer: its host does not respond")


def test_rank_that_waits_in_an_earlier_call_is_not_missing():
    """The rank that is behind is the cause, not the ranks that wait for it."""
    behind = process(2, member("dp", 2, 3, collective(60, 200), begun=61))
    early = [process(rank, member("dp", rank, 3, begun=60), at=READS) for rank in (0, 1)]
    (text,) = sentences(*early, behind)
    assert text.startswith("all_reduce #60 of group `dp` has waited 200 s for 2 of 3 ranks: rank 0 (host a")


def test_other_call_of_the_same_group_is_a_mismatch():
    other = process(2, member("dp", 2, 3, collective(61, 153, "broadcast"), begun=62))
    (text,) = sentences(waiting(0), waiting(1), other)
    expected = "all_reduce(1 element) on ranks 0, 1; broadcast(1 element) on rank 2"
    assert text == f"calls #61 of group `dp` differ: {expected}"


def test_other_size_is_a_mismatch_except_in_all_to_all():
    def pair(name: str) -> list[dict[str, Any]]:
        calls = [collective(61, 9, name, f"{name}({rank} elements)") for rank in (0, 1)]
        return [process(rank, member("dp", rank, 2, calls[rank], begun=62)) for rank in (0, 1)]

    assert sentences(*pair("all_reduce")) == [
        "calls #61 of group `dp` differ: all_reduce(0 elements) on rank 0; all_reduce(1 elements) on rank 1"
    ]
    assert sentences(*pair("all_to_all")) == [
        "all_to_all #61 of group `dp` has run for 9.0 s: all 2 ranks are in it or have finished it"
    ]


def test_chain_through_two_groups_begins_with_its_cause():
    """Rank 0 waits for rank 1 in `pp`, and rank 1 waits for rank 2 in `dp`."""
    first = process(0, member("pp", 0, 2, collective(3, 160), begun=4))
    second = process(1, member("pp", 1, 2, begun=3), member("dp", 0, 2, collective(61), begun=62))
    third = process(2, member("dp", 1, 2), at=READS)
    assert sentences(first, second, third) == [
        f"all_reduce #61 of group `dp` has waited 154 s for {AWAY}",
        "1 more call waits for ranks that are in these calls",
    ]


def test_cycle_through_two_groups_is_reported_once_with_all_its_calls():
    first = process(0, member("pp", 0, 2, collective(3, 30, "barrier"), begun=4), member("dp", 0, 2))
    second = process(1, member("pp", 1, 2, begun=3), member("dp", 1, 2, collective(61), begun=62), at=READS)
    (text,) = sentences(first, second)
    assert text == (
        "ranks wait for each other since 30 s: rank 0 (host a, pid 4711) waits in barrier #3 of group `pp` (in step "
        "at job.py:12) for rank 1 (host a, pid 4712), which waits in all_reduce #61 of group `dp` (in read_batch at "
        "job.py:6) for rank 0; a rank whose call is asynchronous may be late instead"
    )


def test_two_recvs_that_wait_for_each_other_are_a_cycle():
    pair = [process(rank, member("dp", rank, 2, message(False, 1 - rank))) for rank in (0, 1)]
    (text,) = sentences(*pair)
    assert text.startswith("ranks wait for each other since 20 s: rank 0 ") and "recv #0 from rank 1" in text


def test_send_without_a_recv_names_the_receiver():
    sender = process(0, member("dp", 0, 2, message(True, 1)))
    assert sentences(sender, away(1, 2)) == [
        "send #0 to rank 1 of group `dp` on rank 0 has waited 20 s for rank 1 (host a, pid 4712), which has no "
        "matching recv and is in read_batch at job.py:6"
    ]


def test_recv_without_a_send_names_the_sender_and_its_call():
    receiver = process(0, member("dp", 0, 2, message(False, 1)))
    sender = process(1, member("dp", 1, 2, collective(61, 19), begun=62))
    (text,) = [text for text in sentences(receiver, sender) if "recv" in text]
    # The sender waits for the receiver, so this is a cycle through one group.
    assert text.startswith("ranks wait for each other since 19 s") and "all_reduce #61 of group `dp`" in text


def test_recv_with_another_tag_does_not_match():
    receiver = process(0, member("dp", 0, 2, message(False, 1, tag=5)))
    sender = process(1, member("dp", 1, 2, message(True, 0, tag=7)))
    assert sentences(receiver, sender)[0].startswith("ranks wait for each other since 20 s: rank 0 (host a, pid 4711)")
    sender = process(1, member("dp", 1, 2, message(True, 0, tag=5)))
    assert "the peer has the matching call" in sentences(receiver, sender)[0]


def test_recv_from_any_rank_is_reported_without_a_cause():
    assert sentences(process(0, member("dp", 0, 2, message(False, None))), away(1, 2)) == [
        "recv #0 from any rank of group `dp` on rank 0 has waited 20 s; no matching send was made"
    ]


def test_several_missing_ranks_are_named_and_the_rest_counted():
    (text,) = sentences(waiting(0, 9), *(away(rank, 9) for rank in range(1, 9)))
    assert "has waited 154 s for 8 of 9 ranks: rank 1 (host a, pid 4712), which is in read_batch" in text
    assert text.endswith("; and ranks 5-8") and text.count("which is") == 4


def test_all_ranks_in_the_call_have_no_missing_rank():
    (text,) = sentences(*(waiting(rank) for rank in range(3)))
    assert text == "all_reduce #61 of group `dp` has run for 154 s: all 3 ranks are in it or have finished it"


def test_rank_that_has_finished_the_call_is_not_missing():
    done = process(2, member("dp", 2, 3, begun=62))
    (text,) = sentences(waiting(0), waiting(1), done)
    assert "all 3 ranks are in it or have finished it" in text


def test_ranks_that_were_not_queried_are_unknown():
    (text,) = sentences(waiting(0, 8), waiting(1, 8))
    assert text == "all_reduce #61 of group `dp` has waited 154 s; the state of 6 of its 8 ranks is unknown"


def test_rank_that_left_the_group_is_named():
    job = Job([waiting(0, 2), process(1, at=READS)])
    job.add_group("id of dp", {0: Member("a", 4711), 1: Member("a", 4712)})
    (text,) = sentences(job=job)
    assert text.endswith("rank 1 (host a, pid 4712), which has left the group and is in read_batch at job.py:6")


def test_nothing_waits():
    assert sentences(away(0), away(1), away(2)) == [
        "no call has waited for 5 s or longer (3 of 3 processes answered, on 2 hosts)"
    ]


def test_short_wait_is_reported_as_the_longest_and_is_below_the_threshold():
    short = process(0, member("dp", 0, 2, collective(61, 2.25), begun=62))
    found = verdict.of(Job([short, away(1, 2)]), 5.0)
    (text,) = found.sentences
    assert not found.waits_long and text.startswith("no call has waited for 5 s or longer (2 of 2")
    assert "; the longest: all_reduce #61 of group `dp` has waited 2.2 s for rank 1 (host a" in text
    assert verdict.of(Job([short, away(1, 2)]), 2.0).waits_long


def test_failed_group_is_reported_with_its_error():
    failed = process(0, member("dp", 0, 2, error="all_reduce #61 on group `dp` timed out\nmore"))
    assert sentences(failed, away(1, 2))[1] == "group `dp` has failed on rank 0: all_reduce #61 on group `dp` timed out"


def test_rank_without_a_record_is_not_called_missing():
    off = process(1, member("dp", 1, 2, begun=0, recorded=False))
    (text,) = sentences(waiting(0, 2), off)
    assert text.endswith("the state of 1 of its 2 ranks is unknown")


def test_two_jobs_have_separate_verdicts():
    """Groups of two jobs have equal names; only their identities differ."""
    found = []
    for job in (1, 2):
        for rank in (0, 1):
            one = (waiting if rank == 0 else away)(rank, 2, host=f"h{job}")
            one["groups"][0]["id"], one["process"] = f"job {job}", f"{job}{rank}"
            found.append(one)
    grouped = jobs.of(found, lambda one: "the same shell")
    assert [[one["host"] for one in job.processes] for job in grouped] == [["h1", "h1"], ["h2", "h2"]]
    for number, job in enumerate(grouped, 1):
        (text,) = sentences(job=job)
        assert f"for rank 1 (host h{number}, pid 4712)" in text


@pytest.mark.parametrize("size", [1 << 62, -5, 0])
def test_hostile_values_neither_take_long_nor_fail(size: int):
    """Another process may report any number and any text."""
    hostile = member("x" * 5000, -1, size, collective(-1, 1e300, "\x1b[2J" * 900), begun=1 << 62)
    found = sentences(process(7, hostile, at="a" * 9000 + ":1 in f"), waiting(0))
    assert all(len(text) <= 2000 for text in found)


def test_large_job_with_many_late_ranks_takes_less_than_two_seconds():
    """2048 ranks wait for 2048 others, which wait for them in another group."""
    ranks, found = range(4096), []
    for rank in ranks:
        calls = [[collective(61)], []] if rank % 2 else [[], [collective(61)]]
        groups = [member(name, rank, 4096, *call, begun=61 + len(call)) for name, call in zip(("dp", "tp"), calls)]
        found.append(process(rank, *groups, host=f"h{rank // 8}"))
    started = time.thread_time()
    (text,) = sentences(*found)
    assert text.startswith("ranks wait for each other since 154 s: rank 0 (host h0, pid 4711) waits in all_reduce #61")
    late = [one for one in found if one["rank"] % 2] + [away(rank, 4096, host="h") for rank in ranks if rank % 2 == 0]
    assert "has waited 154 s for 2048 of 4096 ranks: rank 0 (host h, pid 4711)" in sentences(*late)[0]
    assert time.thread_time() - started < 15.0


@pytest.mark.parametrize("peer", [1, 0], ids=["other rank", "same rank"])
def test_largest_hostile_answer_takes_less_than_two_seconds(peer: int):
    """An answer of 4 MiB contains as many pending messages as the format permits."""
    calls = [{"seq": 1, "what": "", "call": "", "seconds": 9, "message": {"sends": False, "peer": peer, "tag": 1}}]
    empty = {"way": "", "error": None, "present": None, "last": None, "taken": []}
    groups = [{"name": f"{number:4}", "rank": 0, "size": 2, "pending": calls * 64, **empty} for number in range(700)]
    text = json.dumps({**process(0), "time_ns": 1, "groups": groups}, separators=(",", ":"))
    assert 0.9 * (4 << 20) < len(text) <= 4 << 20
    started = time.thread_time()
    one = dumps.parse(text, operations=False)
    other = process(1, *({**group, "rank": 1, "pending": []} for group in groups))
    found = sentences(one, other)
    assert time.thread_time() - started < 15.0 and len(found) <= 7 and all(len(text) <= 2000 for text in found)


def test_more_calls_and_groups_than_a_process_sends_are_an_error():
    group = {**member("dp", 0, 2), "way": "", "last": None, "taken": []}
    calls = {**process(0, {**group, "pending": [collective(1)] * 65}), "time_ns": 1}
    with pytest.raises(ValueError, match=r"^groups\[0\].pending: expected at most 64 calls, got 65$"):
        dumps.parse(json.dumps(calls), operations=False)
    with pytest.raises(ValueError, match=r"^groups: expected at most 8192, got 8193$"):
        dumps.parse(json.dumps({**process(0), "time_ns": 1, "groups": [group] * 8193}), operations=False)


def test_recv_from_the_own_rank_is_not_a_cycle():
    assert sentences(process(0, member("dp", 0, 2, message(False, 0))), away(1, 2)) == [
        "recv #0 from rank 0 of group `dp` on rank 0 has waited 20 s for rank 0 (host a, pid 4711), which has no "
        "matching send and is in recv #0 from rank 0 of group `dp` for 20 s, in step at job.py:12"
    ]


def test_mismatch_with_a_call_without_a_number_names_the_number():
    leaving = {**collective(61), "what": "destroy_process_group", "call": "destroy_process_group"}
    (text,) = sentences(process(0, member("dp", 0, 2, leaving, begun=62)), waiting(1, 2))
    assert text == ("calls #61 of group `dp` differ: destroy_process_group on rank 0; all_reduce(1 element) on rank 1")


def test_cycle_and_its_consequences_are_counted_separately():
    """Ranks 0 and 1 wait for each other, and rank 2 waits for rank 0 in a third group."""
    first = process(0, member("pp", 0, 2, collective(3, 30), begun=4), member("dp", 0, 2), member("tp", 0, 2))
    second = process(1, member("pp", 1, 2, begun=3), member("dp", 1, 2, collective(61), begun=62))
    third = process(2, member("tp", 1, 2, collective(61, 20), begun=62))
    text, rest = sentences(first, second, third)
    assert text.startswith("ranks wait for each other since 30 s")
    assert rest == "1 more call waits for ranks that are in these calls"


def test_posted_recv_without_a_waiting_thread_is_not_part_of_a_cycle():
    """Both ranks have posted receives; rank 0 reads a batch instead of sending."""
    first = process(0, member("dp", 0, 2, message(False, 1, 90.0, **POSTED)), at=READS)
    second = process(1, member("dp", 1, 2, message(False, 0, **WAITED)))
    assert sentences(first, second) == [
        "recv #0 from rank 0 of group `dp` on rank 1 has waited 20 s for rank 0 (host a, pid 4711), which has no "
        "matching send and is in read_batch at job.py:6"
    ]


def test_posted_calls_of_a_computing_job_wait_for_nothing():
    posted = [message(False, 1, 90.0, **POSTED), collective(61, 80.0, **POSTED)]
    found = verdict.of(Job([process(0, member("dp", 0, 2, *posted, begun=62)), away(1, 2)]), 5.0)
    assert not found.waits_long
    assert found.sentences == [
        "no call has waited for 5 s or longer (2 of 2 processes answered, on 1 host); 2 calls are pending without a "
        "thread that waits, the longest recv #0 from rank 1 of group `dp` on rank 0"
    ]


def test_wait_counts_from_its_begin_not_from_the_post():
    late = {**WAITED, "waited_seconds": 7.25}
    (text,) = sentences(process(0, member("dp", 0, 2, message(False, 1, 900.0, **late))), away(1, 2))
    assert text.startswith("recv #0 from rank 1 of group `dp` on rank 0 has waited 7.2 s for rank 1")
    assert not verdict.of(Job([process(0, member("dp", 0, 2, message(False, 1, 900.0, **late)))]), 8.0).waits_long


def test_cycle_of_waiting_threads_is_certain():
    pair = [process(rank, member("dp", rank, 2, message(False, 1 - rank, **WAITED))) for rank in (0, 1)]
    (text,) = sentences(*pair)
    assert text.startswith("ranks wait for each other since 20 s: rank 0 ") and "asynchronous" not in text


def _random_job(seed: int) -> Job:
    """Processes with random groups, calls and waits."""
    pick = random.Random(seed)
    size = pick.randint(2, 5)
    groups: list[list[dict[str, Any]]] = [[] for _ in range(size)]
    states = [WAITED, WAITED, POSTED, {}] if seed % 2 else [WAITED, WAITED, POSTED]
    for name in "abc"[: pick.randint(1, 3)]:
        ranks = pick.sample(range(size), pick.randint(2, size))
        for rank, of in enumerate(ranks):
            begun = pick.randint(0, 2)
            seqs = [seq for seq in range(begun) if pick.random() < 0.6]
            calls = [collective(seq, pick.uniform(2, 99), **pick.choice(states)) for seq in seqs]
            for _ in range(pick.choice([0, 0, 1, 2])):
                peer = pick.choice([*range(len(ranks)), None])
                sends = peer is not None and pick.random() < 0.5
                tag = pick.randint(0, 1)
                calls.append(message(sends, peer, pick.uniform(2, 99), tag, **pick.choice(states)))
            groups[of].append(member(name, rank, len(ranks), *calls, begun=begun, finished=0))
    return Job([process(rank, *found) for rank, found in enumerate(groups)])


def _wait_for_edges(job: Job) -> dict[tuple[int, str, int], set[bool | None]]:
    """Returns the waits of each rank for each other one in each group, by the definition of the calls."""
    ranks = {(group["name"], group["rank"]): (one["rank"], group) for one in job.processes for group in one["groups"]}
    edges: dict[tuple[int, str, int], set[bool | None]] = {}
    for (name, rank), (of, group) in ranks.items():
        for call in group["pending"]:
            for peer in range(group["size"]):
                other, others = ranks[name, peer]
                label = call["message"]
                if label is None:
                    awaited = others["submitted"] <= call["seq"]
                else:
                    match = {"sends": not label["sends"], "tag": label["tag"]}
                    labels = [each["message"] for each in others["pending"] if each["message"]]
                    has_match = any({**each, **match} == each and each["peer"] in (rank, None) for each in labels)
                    awaited = label["peer"] == peer and not has_match
                if awaited and peer != rank:
                    edges.setdefault((of, name, other), set()).add(call.get("waits"))
    return edges


def test_each_reported_cycle_is_a_cycle_of_waiting_threads():
    certain = possible = 0
    for seed in range(1500):
        job = _random_job(seed)
        edges = _wait_for_edges(job)
        for text in (one for one in sentences(job=job) if one.startswith("ranks wait for each other")):
            first = re.search(r": rank (\d+) ", text)
            steps = re.findall(r"waits in .*? of group `(\w)` \(.*?\) for rank (\d+)", text)
            assert first and len(steps) > 1 and steps[-1][1] == first[1], text
            is_certain, rank = "asynchronous" not in text, int(first[1])
            for name, peer in steps:
                known = edges.get((rank, name, int(peer)), set())
                assert known & ({True} if is_certain else {True, None}), (seed, rank, name, peer, text)
                rank = int(peer)
            certain, possible = certain + is_certain, possible + (not is_certain)
    assert min(certain, possible) > 20, (certain, possible)


def test_many_waits_are_cut():
    many = [waiting(rank, 2, f"g{rank}") for rank in range(40)]
    assert len(sentences(*many)) == 6 and sentences(*many)[-1] == "and 35 more of this kind"
