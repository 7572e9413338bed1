"""`smddp.report()`: one table of a process's groups, with the share of waiting for late ranks."""

from __future__ import annotations

import copy
from typing import Any

from cli.test_dumps import dump, operation
from ranks import forked
from ranks.launching import free_port
from smddp.observability import report

MOVED = [{"group": "0", "collective": "all_reduce", "operations": 1204, "bytes": 3 << 29}]

JOB = """
import numpy as np, smddp, os
comm = smddp.init()
for _ in range(5):
    comm.all_reduce(np.ones(1024, "float32"))
print(smddp.report())
comm.barrier()
comm.close()
print(smddp.report())
"""


def of_rank(rank: int, late_ns: int) -> dict[str, Any]:
    """Returns the dump of a rank that makes each of 30 calls `late_ns` late. A call ends 40 ms after its due time."""
    found = copy.deepcopy(dump(rank))
    found["groups"][0]["operations"] = [
        {
            **operation(number),
            "submitted_ns": number * 100_000_000 + late_ns,
            "ended_ns": number * 100_000_000 + 40_000_000,
            "seconds": (40_000_000 - late_ns) / 1e9,
        }
        for number in range(1, 31)
    ]
    return found


def test_report_shows_totals_times_and_the_wait_for_the_late_rank():
    job = [of_rank(0, 0), of_rank(1, 30_000_000)]
    head, columns, row, foot, late = report.lines(job[0], MOVED, job)
    assert head.startswith("smddp: rank 0 (host h0")
    assert columns.split() == list(report._HEAD)
    assert row.split("  ")[0] == "0" and "1204" in row and "1.5 GiB" in row and "40.00 ms" in row and "1.2 s" in row
    # Rank 0 waits 30 of 40 ms for rank 1, which waits for nothing.
    assert "75 %" in row
    assert "the newest 30 operations" in foot and "over 2.9 s" in foot
    assert late.startswith("rank 1 was last in 100%")
    assert " 0 % " in report.lines(job[1], MOVED, job)[2]


def test_report_without_the_other_ranks_shows_no_wait():
    row = report.lines(of_rank(0, 0), MOVED, [])[2]
    assert row.endswith("-") and "1204" in row


def test_report_compares_the_shortest_time_with_the_prediction():
    """Calls end 10 ms after the late rank's, and the model predicts 4 ms."""
    job = [of_rank(0, 0), of_rank(1, 30_000_000)]
    for one in job:
        assert report.lines(one, MOVED, job, lambda _group, _op: 4e-3)[2].endswith("2.5")
        assert report.lines(one, MOVED, job)[2].endswith(" -")


def test_report_escapes_names_of_groups():
    one = of_rank(0, 0)
    one["groups"][0]["name"] = "a\x1b[2J"
    moved = [{**MOVED[0], "group": "a\x1b[2J"}]
    assert "\x1b" not in "\n".join(report.lines(one, moved, []))


def test_ranks_of_a_job_report_their_groups_while_these_are_open():
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ended = forked.run_all([(JOB, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)])
    for rank, done in enumerate(ended):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith(f"smddp: rank {rank} ")
        (row,) = [line.split() for line in lines if " all_reduce " in line]
        assert row[1:4] == ["2", "all_reduce", "5"], lines
        # Clocks of two processes may differ by more than the time of such a small call, which then has no ratio.
        assert row[-1] == "-" or float(row[-1]) > 0, lines
        assert lines[-1] == "no open group of smddp in this process has made a call"
