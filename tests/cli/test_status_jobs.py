"""Answers of several hosts become jobs, and the table fits the terminal."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from smddp.observability import jobs, status, status_table, verdict
from smddp.observability.jobs import Job, Member


def group(name: str, rank: int, size: int) -> dict[str, Any]:
    call = {"what": "all_reduce #3", "algorithm": "mesh", "seconds": 6.5}
    taken = [{"algorithm": f"algorithm-{number}", "bytes": 1 << 20} for number in range(4)]
    return {
        "name": name,
        "id": f"id of {name}",
        "rank": rank,
        "size": size,
        "way": "tcp eth0 10.0.0.1",
        "error": None,
        "present": call,
        "last": {**call, "what": "all_reduce #2"},
        "taken": taken,
        "submitted": 4,
        "recorded": True,
        "pending": [{"seq": 3, "what": "all_reduce #3", "call": "all_reduce()", "seconds": 6.5, "message": None}],
    }


def process(rank: int, *groups: dict[str, Any], host: str = "a") -> dict[str, Any]:
    return {
        "version": "0.1.0",
        "host": host,
        "pid": 100 + rank,
        "rank": rank,
        "process": f"{rank:016x}",
        "time_ns": 5,
        "at": "/home/me/long/project/train.py:1 in read_batch < /home/me/project/train.py:2 in main",
        "groups": list(groups),
    }


def answer(*processes: dict[str, Any], silent: dict[int, str] | None = None, size: int = 4) -> dict[str, Any]:
    """The answer to a job query, of group `world`."""
    members = [f"rank {rank} (host {'ab'[rank // 2]}, pid {100 + rank})" for rank in range(size)]
    world = {"name": "world", "id": "id of world", "rank": 0, "size": size, "members": members}
    entry = {"group": "id of world"}
    return {
        "groups": [world],
        "answers": [{**entry, "rank": one["rank"], "text": json.dumps(one)} for one in processes],
        "silent": [{**entry, "rank": rank, "reason": reason} for rank, reason in (silent or {}).items()],
    }


def world(rank: int, host: str = "a") -> dict[str, Any]:
    return process(rank, group("world", rank, 4), host=host)


def test_processes_are_one_job_if_groups_connect_them():
    """Ranks 0-1 and 1-2 have a common group; rank 3 has another one, and two processes have none."""
    found = [
        process(0, group("x", 0, 2)),
        process(3, group("z", 0, 2)),
        process(2, group("y", 1, 2)),
        process(1, group("x", 1, 2), group("y", 0, 2)),
        process(8),
        process(9),
    ]
    grouped = jobs.of(found, lambda one: str(one["pid"] // 2))
    ranks = sorted(sorted(one["rank"] for one in job.processes) for job in grouped)
    assert ranks == [[0, 1, 2], [3], [8, 9]]


def test_answers_of_other_hosts_are_merged_once():
    job = Job([world(0), world(1)])
    asked = []

    def ask(one: dict[str, Any]) -> Any:
        asked.append(one["rank"])
        return answer(world(1), world(2, "b"), silent={3: "its host does not respond"})

    jobs.complete(job, ask, 60)
    assert [one["rank"] for one in job.processes] == [0, 1, 2] and asked == [0]
    (silent,) = job.silent
    assert str(silent) == "rank 3 (host b, pid 103)" and silent.reason == "its host does not respond"


def test_silent_process_has_a_rank_in_each_group_that_becomes_known():
    """Rank 3 is silent in the answer of rank 0; only rank 1 shares group `dp1` with it."""
    names = [f"rank {rank} (host {'ab'[rank // 2]}, pid {100 + rank})" for rank in range(4)]
    idle = {"present": None, "pending": [], "submitted": 3}
    waits = process(1, {**group("world", 1, 4), **idle}, group("dp1", 0, 2))
    job = Job([process(0, {**group("world", 0, 4), **idle}, group("dp0", 0, 2)), waits])
    other = process(2, {**group("world", 2, 4), **idle}, {**group("dp0", 1, 2), **idle}, host="b")
    asked: list[int] = []

    def ask(one: dict[str, Any]) -> Any:
        asked.append(one["rank"])
        given = answer(other, silent={3: "its host does not respond"})
        members = [names[one["rank"]], names[one["rank"] + 2]]
        name = f"dp{one['rank']}"
        given["groups"].append({"name": name, "id": f"id of {name}", "rank": 0, "size": 2, "members": members})
        return given

    jobs.complete(job, ask, 60)
    (silent,) = job.silent
    assert asked == [0, 1] and silent.ranks == {"id of world": 3, "id of dp1": 1}
    sentences = verdict.of(job, 5.0).sentences
    name = "rank 3 (host b, pid 103), which does not answer: its host does not respond"
    assert f"all_reduce #3 of group `dp1` has waited 6.5 s for {name}" in sentences, sentences


def test_process_that_answers_the_second_query_is_not_silent():
    job = Job([process(0, group("world", 0, 4), group("x", 0, 2)), process(1, group("world", 1, 4), group("y", 0, 2))])
    given = [answer(world(2, "b"), silent={3: "no reply within 2 s"}), answer(world(2, "b"), world(3, "b"))]
    jobs.complete(job, lambda one: given[one["rank"]], 60)
    assert not job.silent and [one["rank"] for one in job.processes] == [0, 1, 2, 3]


def test_process_of_this_host_is_shown_although_another_host_has_its_pid():
    job = Job([world(0)])
    job.add_group("id of world", {1: Member("elsewhere", 7)})
    job.add_silent(Member("elsewhere", 7), "its host does not respond")
    state = status._State(job.processes, {7: "no answer: timed out"}, [job], [verdict.of(job, 5.0)], [[]], [[]])
    assert status._text(state, 120)[-1] == "pid 7: no answer: timed out"


def test_complete_job_is_not_queried():
    job = Job([world(rank) for rank in range(4)])
    jobs.complete(job, lambda one: pytest.fail("a query of a complete job"), 60)
    assert not job.problems


def test_next_process_is_asked_about_groups_that_are_still_incomplete():
    job = Job([process(0, group("world", 0, 4)), process(1, group("other", 0, 2))])
    asked: list[int] = []

    def ask(one: dict[str, Any]) -> Any:
        asked.append(one["rank"])
        if one["rank"] == 0:
            raise ConnectionError("it has no thread for that")
        return answer()

    jobs.complete(job, ask, 60)
    assert asked == [0, 1] and job.problems == ["pid 100 cannot query the other hosts: it has no thread for that"]


def test_groups_whose_members_are_known_are_not_queried_again():
    """A rank that has left a group has no dump with it, however often other ranks are asked."""
    left = process(2, group("other", 1, 2), host="b")
    job = Job([world(0), world(1)])
    asked: list[int] = []

    def ask(one: dict[str, Any]) -> Any:
        asked.append(one["rank"])
        return answer(left, silent={3: "its host does not respond"})

    jobs.complete(job, ask, 60)
    assert asked == [0] and [one["rank"] for one in job.processes] == [0, 1, 2]


def test_time_limit_ends_the_queries_and_equal_problems_are_one_line():
    job = Job([process(rank, group(f"g{rank}", 0, 2)) for rank in range(3)])
    jobs.complete(job, lambda one: pytest.fail("a query after the time limit"), 0)

    def ask(one: dict[str, Any]) -> Any:
        raise TimeoutError("timed out")

    jobs.complete(job, ask, 60)
    assert job.problems == ["pid 100 and 2 more processes cannot query the other hosts: timed out"]


def test_process_of_an_older_version_is_not_queried():
    old = world(0)
    del old["groups"][0]["id"]
    jobs.complete(Job([old]), lambda one: pytest.fail("a query of an older version"), 60)


def test_many_idle_groups_of_a_process_are_counted():
    groups = [{**group(f"g{number}", 0, 2), "present": None} for number in range(30)]
    groups[20] = group("busy", 0, 2)
    lines = status_table.rows([process(0, *groups)], 120)
    assert len(lines) == 6 and "busy" in "\n".join(lines) and lines[-1].split() == ["0", "100", "+26", "more"]


def test_all_jobs_are_queried_at_the_same_time_within_one_limit(monkeypatch: pytest.MonkeyPatch):
    """Each answer waits until the processes of all jobs have been asked."""
    found = [Job([process(number, group(f"g{number}", 0, 2))]) for number in range(3)]
    places = {id(job.processes[0]): status.Process(number, True, "", 0) for number, job in enumerate(found)}
    all_asked = threading.Barrier(3)

    def ask(one: status.Process) -> Any:
        all_asked.wait(60)
        raise TimeoutError(f"no answer of {one.pid}")

    monkeypatch.setattr(status, "_ask_job", ask)
    status._complete(found, places)
    texts = [f"pid {100 + number} cannot query the other hosts: no answer of {number}" for number in range(3)]
    assert [job.problems for job in found] == [[text] for text in texts]
    monkeypatch.setattr(status, "_ALL_JOBS", 0.0)
    late = [Job([process(3, group("x", 0, 2))])]
    status._complete(late, {})
    assert not late[0].problems, "a query after the limit"


def test_json_says_which_processes_are_of_this_host():
    dumped = [{**group("world", rank, 4), "operations": [], "messages": []} for rank in (0, 1)]
    here = [process(rank, dumped[rank]) for rank in (0, 1)]
    job = Job([*here, world(2, "b")])
    job.add_group("id of world", {3: Member("b", 103)})
    job.add_silent(Member("b", 103), "its host does not respond")
    state = status._State(here, {}, [job], [verdict.of(job, 5.0)], [[]], [[]])
    made = status._as_json(state, status.Options())
    assert [one["local"] for one in made["processes"]] == [True, True, False]
    silent = {"host": "b", "pid": 103, "rank": 3, "reason": "its host does not respond"}
    assert made["jobs"][0]["silent"] == [silent] and "operations" not in made["processes"][0]["groups"][0]


BAD_TEXTS = ["", "{", "[]", "{}", "[" * 5000, json.dumps(world(2, "elsewhere")), json.dumps({**world(2, "b"), "at": 1})]


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_malformed_reply_makes_its_rank_silent_and_hides_no_other(text: str):
    given = answer(world(2, "b"), world(3, "b"))
    given["answers"][0]["text"] = text
    job = Job([world(0), world(1)])
    jobs.complete(job, lambda one: given, 60)
    assert [one["rank"] for one in job.processes] == [0, 1, 3]
    (silent,) = job.silent
    assert silent.member == Member("b", 102) and silent.reason.startswith("no answer: ") and len(silent.reason) < 400


@pytest.mark.parametrize("key", ["groups", "answers", "silent"])
@pytest.mark.parametrize("value", [None, 3, "x", [None], [{}], [{"group": "", "rank": "x", "reason": 1, "text": 2}]])
def test_malformed_answer_is_a_problem_of_the_asked_process(key: str, value: Any):
    job = Job([world(0)])
    jobs.complete(job, lambda one: {**answer(), key: value}, 60)
    (problem,) = job.problems
    assert problem.startswith("pid 100 cannot query the other hosts: ") and len(problem) < 300


def test_strange_members_and_ranks_are_ignored():
    given = answer(silent={-1: "x", 99: "y", 2: "z"})
    given["groups"][0]["members"][0] = "rank 99999999999999 (host x, pid 1)"
    given["groups"][0]["members"][1] = "\x1b[2J"
    job = Job([world(0)])
    jobs.complete(job, lambda one: given, 60)
    assert sorted(job.members["id of world"]) == [2, 3] and [one.reason for one in job.silent] == ["z"]


@pytest.mark.parametrize("columns", [80, 100, 120, 200, 10_000])
def test_table_fits_the_terminal(columns: int):
    answers = [world(0), world(1), world(2, "b")]
    lines = status_table.rows(answers, columns)
    assert all(len(line) <= columns for line in lines) and len(lines) == 4
    for line in lines[1:]:
        assert "all_reduce #3" in line and "6.5 s" in line and "train.py:1 in read_batch < " in line
    assert ("ALGORITHM" in lines[0], "LAST FINISHED" in lines[0]) == (columns >= 200, columns >= 120)
    whole = all(line.endswith("train.py:2 in main") for line in lines[1:])
    assert whole or columns <= 100, "the frames without folders fit"
    assert lines[0].startswith("HOST  RANK  PID")
    assert status_table.rows(answers[:2], columns)[0].startswith("RANK  PID"), "one host needs no column"


def test_verdicts_of_all_jobs_precede_the_tables():
    one, other = world(0), process(1, group("other", 0, 1), host="b")
    lines = status.lines([one, other], {7: "stopped"}, 100)
    assert [line.partition(": ")[0] for line in lines[:2]] == ["job 1", "job 2"]
    assert lines[2:4] == ["", "job 1: 1 process, host a"] and "job 2: 1 process, host b" in lines
    assert lines[-1] == "pid 7: stopped"


def test_text_of_other_processes_is_escaped():
    hostile = world(0, "\x1b[2J\u202e\n")
    hostile["at"] = hostile["groups"][0]["name"] = "\x1b]0;x\x07\n" * 50
    lines = status.lines([hostile], {1: "\x1b"}, 80)
    assert all(line.isprintable() and len(line) < 2100 for line in lines), lines
