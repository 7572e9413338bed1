"""Groups without torch across hosts: shared memory inside, sockets between."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hosts import netlab

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("hosts", "procs"), [(2, 2), (3, 1)])
def test_numpy_arrays_are_summed_across_hosts(hosts: int, procs: int) -> None:
    if reason := netlab.why_not():
        pytest.skip(reason)
    script = str(ROOT / "examples" / "numpy_allreduce.py")
    outcome = netlab.run([sys.executable, script], hosts=hosts, procs=procs, seconds=60)
    assert outcome.status == 0, outcome
    way = "shm + tcp eth0" if procs > 1 else "tcp eth0"
    assert f"{hosts * procs} ranks over {way}" in outcome.said[0], outcome
