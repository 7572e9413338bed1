"""`smddp status` in a job of two hosts with two ranks each that hangs: the first line has the cause, on each host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hosts import netlab

START_SECONDS, WAIT_SECONDS = 60.0, 30.0
IN_READ_BATCH = r"which is in read_batch at \S*hang\.py:\d+"


def rank(number: int) -> str:
    return rf"rank {number} \(host h{number // 2}, pid \d+\)"


def late(number: int) -> str:
    return f"{rank(number)}, {IN_READ_BATCH}"


def waits(call: str, ranks: str) -> str:
    return rf"^{call} #\d+ .*of group `[^`]+`( on rank \d)? has waited [\d.]+ s for {ranks}"


def cycle(first: int, call: str, second: int) -> str:
    return rf"^ranks wait for each other since [\d.]+ s: {rank(first)} waits in {call} .* for rank {second}"


#: Pattern of the first line for each situation of `jobs/hang.py`.
VERDICTS = {
    "rank-0-in-user-code": waits("all_reduce", late(0)),
    "rank-2-in-user-code": waits("all_reduce", late(2)),
    "two-ranks-in-user-code": waits("all_reduce", rf"2 of 4 ranks: {late(1)}; {late(3)}"),
    "three-ranks-in-user-code": waits("all_reduce", rf"3 of 4 ranks: {late(0)}; {late(1)}; {late(2)}"),
    "stopped": waits("all_reduce", rf"{rank(3)}, which (is stopped|does not answer: .*stopped)"),
    "cut": waits("all_reduce", rf".*({late(3)}|{rank(3)}, which does not answer: its host does not respond)"),
    "powered-off": waits("all_reduce", rf".*{rank(3)}, which does not answer: its host does not respond"),
    "late-in-a-sub-group": waits("all_reduce", late(3)),
    "chain-over-groups": waits("all_reduce", rf"(2 of 4 ranks: )?{late(3)}"),
    "chain-over-hosts": waits("all_reduce", late(3)),
    "deadlock-of-two-groups": cycle(0, "all_reduce", 1),
    "deadlock-of-two-ranks": cycle(1, "recv", 2),
    "deadlock-of-recvs": cycle(0, "recv", 2),
    "missing-recv": waits("send", rf"{rank(3)}, which has no matching recv and is in read_batch"),
    "missing-send": waits("recv", rf"{rank(0)}, which has no matching send and is in read_batch"),
    "missing-send-of-any-rank": r"^recv #\d+ from any rank .* on rank 1 has waited [\d.]+ s; no matching send was made",
    "asynchronous": waits("all_reduce", late(1)),
    "in-a-thread": waits("all_reduce", late(2)),
    "barrier": waits("barrier", late(3)),
    "split": waits("all_gather", late(1)),
    "idle": r"^no call has waited for 5 s or longer \(4 of 4 processes answered, on 2 hosts\)",
}
FAULTS = {"stopped": ["stop", "rank=3"], "cut": ["cut", "host=1"], "powered-off": ["poweroff", "host=1"]}
#: Situations of the ordinary tests.
USUAL = ("chain-over-groups", "deadlock-of-two-groups")


@contextmanager
def hanging_job(situation: str, folder: Path) -> Iterator[dict[str, str]]:
    """Runs the job until all ranks are in the situation. Returns the environment of the lab's commands."""
    env = {"SMDDP_DEADLOCK": "off", "SMDDP_PEER_TIMEOUT": "60"}
    size = ["--hosts", "2", "--procs", "2", "--keep-going", "--logs", str(folder), "--timeout", "120"]
    with open(folder / "netlab.log", "w") as log:
        job = netlab.start(
            [*size, "--", *netlab.job("hang"), situation, str(folder)], env, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        end = time.monotonic() + START_SECONDS
        while not all((folder / f"hangs{number}").exists() for number in range(4)):
            logs = {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}
            assert job.poll() is None and time.monotonic() < end, logs
            time.sleep(0.02)
        lab, directory = (folder / "lab").read_text().split("\n")
        yield {**os.environ, "NETLAB": lab, "NETLAB_DIR": directory}
    finally:
        job.terminate()
        job.wait()


def in_lab(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(netlab.NETLAB), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "situation", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in VERDICTS]
)
def test_the_first_line_names_the_cause_on_each_host(situation: str, tmp_path: Path) -> None:
    with hanging_job(situation, tmp_path) as env:
        if fault := FAULTS.get(situation):
            assert in_lab(env, "fault", *fault).returncode == 0
        for host in ["h0"] if situation == "powered-off" else ["h0", "h1"]:
            end = time.monotonic() + WAIT_SECONDS
            while True:
                shown = in_lab(env, "exec", host, "--", sys.executable, "-m", "smddp", "status")
                status = 0 if situation == "idle" else 3
                if re.search(VERDICTS[situation], shown.stdout.partition("\n")[0]) and shown.returncode == status:
                    break
                assert time.monotonic() < end, f"{host}: status {shown.returncode}\n{shown.stdout}{shown.stderr}"
