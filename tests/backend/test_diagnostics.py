"""Diagnostics of a running and a failed job: the missing rank's source line, `smddp status`, dumps and traces.

Four ranks on two simulated nodes, so that queries use unix sockets and TCP.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import smddp
import torch
import torch.distributed as dist
from ranks.cases import Cases, keeps_group
from ranks.pool import Pool
from smddp.observability import status, timeline, trace

SECONDS = 60.0
DEADLINE = datetime.timedelta(seconds=0.7)
_HERE = re.escape(Path(__file__).name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def pool(folder: Path) -> Any:
    with Pool(4, lambda rank: {"SMDDP_NODE": f"node{rank // 2}", "SMDDP_DUMP_DIR": str(folder)}) as made:
        yield made


cases = Cases()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def asleep_in_user_code(key: str, ranks: int) -> None:
    """Sleeps until `ranks` ranks have reached their deadline."""
    while _store().add(key, 0) < ranks:
        time.sleep(0.005)


def _deadline_passes(ranks: list[int], asleep: int, key: str) -> str:
    """Makes a call on all ranks but one. Returns the error on the others."""
    group = dist.new_group(ranks, timeout=DEADLINE)
    text = ""
    if dist.get_rank() == asleep:
        dist.barrier(group) if len(ranks) == 2 else None
        asleep_in_user_code(key, len(ranks) - 1)
    elif dist.get_rank() in ranks:
        dist.barrier(group) if len(ranks) == 2 else None
        with pytest.raises(smddp.CollectiveTimeoutError) as raised:
            dist.all_reduce(torch.ones(2), group=group)
        _store().add(key, 1)
        text = str(raised.value)
    dist.barrier()
    return text


@keeps_group
def a_sleeper_is_named() -> None:
    text = _deadline_passes([0, 1, 2, 3], 3, "four")
    if dist.get_rank() != 3:
        assert re.search(rf"rank 3 is in no call of this group.*{_HERE}:\d+ in asleep_in_user_code", text), text
        assert "3 of 4 ranks arrived" in text, text
        assert "the call is all_reduce(2 elements of float32, sum)" in text, text
    text = _deadline_passes([0, 1], 1, "two")
    if dist.get_rank() == 0:
        assert re.search(rf"rank 1 is in no call.*last finished barrier #\d+.*{_HERE}:\d+ in asleep_in_user", text), (
            text
        )


@cases
def missing_ranks_of_a_new_group_are_named() -> None:
    """A missing rank on rank 0's node and one on the other node."""
    if dist.get_rank() in (0, 3):
        with pytest.raises(smddp.CollectiveTimeoutError) as raised:
            dist.new_group(timeout=DEADLINE)
        text = str(raised.value)
        assert text.startswith("new_group on group"), text
        for rank in (1, 2):
            name = rf"rank {rank} \(host {socket.gethostname()}, pid \d+\)"
            assert re.search(rf"{name} is in no call of this group.*{_HERE}:\d+ in asleep_in_user_code", text), text
        _store().add("no group", 1)
    else:
        asleep_in_user_code("no group", 2)
        # torch names a group by the number of groups before it.
        dist.distributed_c10d._world.group_count += 1
    dist.barrier()


@cases
def another_group_is_named() -> None:
    """Rank 1 waits in another group."""
    late, other = dist.new_group([0, 1], timeout=DEADLINE), dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(
            smddp.CollectiveTimeoutError, match=r"rank 1 is in no call of this group.*but in barrier #\d+ of group"
        ):
            dist.all_reduce(torch.ones(2), group=late)
        _store().add("other", 1)
    elif dist.get_rank() == 1:
        dist.barrier(other)
    elif dist.get_rank() == 2:
        asleep_in_user_code("other", 1)
        dist.barrier(other)
    dist.barrier()


@cases
def a_call_of_another_group_that_has_failed_is_named() -> None:
    """Rank 1's deadline in another group passes first."""
    late, other = dist.new_group([0, 1], timeout=2 * DEADLINE), dist.new_group([1, 2], timeout=DEADLINE)
    if dist.get_rank() == 0:
        said = r"rank 1 is in no call of this group.*and barrier #\d+ of group `.*` failed 0\.\d s ago"
        with pytest.raises(smddp.CollectiveTimeoutError, match=said):
            dist.all_reduce(torch.ones(2), group=late)
        _store().add("failed", 1)
    elif dist.get_rank() == 1:
        with pytest.raises(smddp.CollectiveTimeoutError):
            dist.barrier(other)
        asleep_in_user_code("failed", 1)
    elif dist.get_rank() == 2:
        asleep_in_user_code("failed", 1)
    dist.barrier()


@cases
def a_stopped_rank_is_named() -> None:
    group = dist.new_group([0, 1], timeout=DEADLINE)
    pids = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(smddp.CollectiveTimeoutError, match=r"rank 1 is stopped \(by a signal"):
                dist.all_reduce(torch.ones(2), group=group)
            assert status._gather([pids[1]], 2)[1][pids[1]].startswith("stopped")
        finally:
            os.kill(pids[1], signal.SIGCONT)
            _store().add("stopped", 1)
    elif dist.get_rank() == 1:
        asleep_in_user_code("stopped", 1)
    dist.barrier()


@cases
def a_rank_that_stopped_after_it_arrived() -> None:
    group = dist.new_group([0, 1, 3], timeout=DEADLINE)
    pids = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        asleep_in_user_code("begun", 1)
        os.kill(pids[1], signal.SIGSTOP)
        try:
            with pytest.raises(smddp.CollectiveTimeoutError) as raised:
                dist.all_reduce(torch.ones(2), group=group)
        finally:
            os.kill(pids[1], signal.SIGCONT)
            _store().add("went on", 1)
        assert re.search(r"2 of 3 ranks arrived, missing: rank 2 .* is stopped \(by a", str(raised.value)), raised.value
        assert raised.value.ranks == [1, 3], raised.value.ranks
    elif dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        _store().add("begun", 1)
        asleep_in_user_code("went on", 1)
        with pytest.raises(smddp.CollectiveTimeoutError):
            work.wait()
    elif dist.get_rank() == 3:
        asleep_in_user_code("went on", 1)
    dist.barrier()


@cases
def a_waiting_rank_is_seen() -> None:
    pids = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    assert set(pids) <= set(status.pids())
    # Silent and malformed clients do not block the answers to others.
    silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    foreign = socket.socket(socket.AF_UNIX)
    foreign.bind(b"\0\xa1\xff\r" + bytes(str(os.getpid()), "ascii"))
    if dist.get_rank() == 0:
        for one in silent:
            one.connect("\0" + next(p.socket for p in status.processes() if p.pid == pids[1]))
            one.sendall(b"smddp-q1" + bytes(16))
        until = time.monotonic() + 20
        while True:
            found = [status.ask(pid) for pid in pids[1:]]
            does = [next(group["present"] for group in one["groups"] if group["size"] == 4) for one in found]
            if all(one and one["what"].startswith("barrier") for one in does) or time.monotonic() > until:
                break
        assert all(one and one["what"].startswith("barrier") and one["seconds"] < 60 for one in does), does
        assert all(f"{Path(__file__).name}:" in one["at"] for one in found), found
        table = "\n".join(status.lines(found, {}))
        assert all(f"{pid}" in table for pid in pids[1:]) and "barrier #" in table, table
        command = [sys.executable, "-m", "smddp", "status", str(pids[1]), "--json"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert json.loads(said.stdout)["processes"][0]["pid"] == pids[1], said
    dist.barrier()
    for one in (*silent, foreign):
        one.close()


@cases
def a_dump_has_every_call() -> None:
    group = dist.new_group([0, 1, 2, 3])
    for _ in range(3):
        dist.all_reduce(torch.ones(5), group=group)
    dist.broadcast(torch.ones(3, dtype=torch.int32), src=2, group=group)
    found = next(one for one in smddp.dump()["groups"] if one["name"] == group.communicator.name)
    calls = [(one["what"], one["bytes"], one["outcome"]) for one in found["operations"][-4:]]
    assert calls == [(f"all_reduce #{n}", 20, "ok") for n in range(1, 4)] + [("broadcast #4", 12, "ok")], calls
    times = [(one["submitted_ns"], one["ended_ns"]) for one in found["operations"]]
    assert all(begun <= ended < time.time_ns() + 1e9 for begun, ended in times) and times == sorted(times), times
    assert "root 2" in found["operations"][-1]["call"]
    dist.barrier()


@cases
def a_late_sender_is_named_and_messages_are_recorded() -> None:
    """Once on this node and once on the other node."""
    rank = dist.get_rank()
    for source, key in ((1, "local"), (2, "remote")):
        group = dist.new_group([0, source], timeout=DEADLINE)
        if rank == source:
            dist.send(torch.ones(3), 0, group=group)
            asleep_in_user_code(key, 1)
        elif rank == 0:
            found = torch.empty(3)
            dist.recv(found, source, group=group)
            with pytest.raises(smddp.CollectiveTimeoutError) as raised:
                dist.recv(found, source, group=group, tag=5)
            _store().add(key, 1)
            text = str(raised.value)
            assert re.match(r"recv #1 from rank 1 \(3 elements of float32, tag 5\) on group", text), text
            last = r"is in no call of this group \(last finished send #0 to rank 0,"
            assert re.search(rf"rank 1 {last}.*{_HERE}:\d+ in asleep_in_user_code", text), text
            record = next(one for one in smddp.dump()["groups"] if one["name"] == group.communicator.name)
            seen = [(one["call"], one["bytes"], one["outcome"]) for one in record["messages"]]
            call = "recv(3 elements of float32 from rank 1, tag {})"
            assert seen == [(call.format(0), 12, "ok"), (call.format(5), 12, "failed")], seen
            assert record["last"]["what"] == "recv #1 from rank 1", record
        dist.barrier()


@cases
def a_rank_in_a_collective_is_named() -> None:
    """Once on this node and once on the other node; then the message is sent, and its sender leaves."""
    rank = dist.get_rank()
    for source in (1, 2):
        group = dist.new_group([0, source], timeout=DEADLINE)
        if rank == 0:
            with pytest.raises(smddp.CollectiveTimeoutError) as raised:
                dist.recv(torch.empty(3), source, group=group)
            # Both deadlines end at the same time: rank 1 answers the query, or has failed by then and reports its call.
            named = r"rank 1 (is in barrier #\d for \d|\(.*\) reports: barrier #\d)"
            assert re.search(named, str(raised.value)), raised.value
        elif rank == source:
            with pytest.raises((smddp.CollectiveTimeoutError, smddp.PeerLostError), match=r"recv #0 from rank 1"):
                dist.barrier(group)
        dist.barrier()
        group = dist.new_group([0, source])
        sent = "rank 0 .* left the group .* has no matching recv: it sends 3 elements of float32, tag 0"
        if rank == 0:
            dist.send(torch.ones(3), source, group=group)
            with pytest.raises(smddp.MismatchError, match=sent):
                dist.destroy_process_group(group)
        elif rank == source:
            with pytest.raises(smddp.MismatchError, match=sent):
                dist.barrier(group)
        dist.barrier()


def test_a_rank_asleep_in_user_code_is_named_with_its_line_by_all_others(pool: Pool, folder: Path):
    pool.run(__name__, "a_sleeper_is_named", SECONDS)
    # All ranks wrote a dump, including the sleeping one; their trace has every operation.
    dumps = [json.loads(path.read_text()) for path in sorted(folder.glob("smddp-*.json"))]
    failed = [any(group["error"] for group in dump["groups"]) for dump in dumps]
    assert len(dumps) == 4 and sum(failed) == 3, failed
    (asleep,) = (dump for dump, has in zip(dumps, failed) if not has)
    assert asleep["rank"] == 3 and "asleep_in_user_code" in asleep["at"], asleep["at"]
    bars = [event for event in trace.merged(dumps)["traceEvents"] if event["ph"] == "X"]
    calls = [group[kind] for dump in dumps for group in dump["groups"] for kind in ("operations", "messages")]
    assert len(bars) == sum(map(len, calls))
    assert sum(bar["cat"] == "failed" and bar["name"].startswith("all_reduce") for bar in bars) >= 3
    assert all(bar["ts"] >= 0 and bar["dur"] >= 0 for bar in bars)
    picture = ElementTree.fromstring(timeline.drawn(trace.merged(dumps)))
    titles = [element.text for element in picture.iter() if element.tag.endswith("title")]
    assert len(titles) == len(bars) and sum(title.endswith("failed") for title in titles) >= 3, titles


@pytest.mark.parametrize("case", cases)
def test_diagnostics(pool: Pool, case: str):
    pool.run(__name__, case, SECONDS)


def test_a_trace_of_no_dump_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bad = tmp_path / "bad.json"
    bad.write_text('{"groups": 1}')
    assert trace.main([str(bad)], str(tmp_path / "trace.json")) == 1
    assert "bad.json is not a dump" in capsys.readouterr().err


def test_dumps_of_several_jobs_are_in_separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parents = {11: "1", 12: "1", 21: "2"}
    monkeypatch.setattr(status, "_stat", lambda pid, field: parents[pid])
    found = [{"host": "h", "pid": pid} for pid in parents]
    for name, some in (("two", found), ("one", found[:2])):
        status._write(some, tmp_path / name)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))
    two = ["two/job-1/smddp-h-11.json", "two/job-1/smddp-h-12.json", "two/job-2/smddp-h-21.json"]
    assert found == ["one/smddp-h-11.json", "one/smddp-h-12.json", *two]
