"""`smddp doctor` over a real network: the host with the slow link is named."""

from __future__ import annotations

import json
import sys

import pytest

from hosts import netlab


@pytest.mark.slow
def test_only_the_host_with_the_slow_link_is_reported() -> None:
    outcome = netlab.run(
        [sys.executable, "-m", "smddp", "doctor", "--json"],
        hosts=4,
        procs=1,
        seconds=120,
        options=("--rate", "1gbit", "--fault", "0s rate host=2 to=10mbit"),
    )
    report = json.loads(outcome.said[0][outcome.said[0].index("{") :])
    failing = {row["name"]: row["found"] for row in report["findings"] if row["status"] == "fail"}
    assert list(failing) == ["pairs"] and "all pairs of rank 2 (h2)" in failing["pairs"], outcome
    assert len(report["pairs"]) == 6 and [row["status"] for row in outcome.ranks] == [1, 0, 0, 0], outcome
