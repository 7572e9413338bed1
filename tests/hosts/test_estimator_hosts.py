"""Jobs of an estimator on two hosts of the lab: encryption by the bytes on the wire, a restart after a lost host."""

import re
import subprocess
import sys

import pytest

from hosts import netlab


def run(name: str, place: object) -> str:
    """Runs a script of `jobs/` on the first of two hosts, with netlab's command in ssh's place. Returns its output."""
    script = [sys.executable, netlab.job(name)[-1], str(place), f"{netlab.NETLAB}-rsh"]
    command = [netlab.NETLAB, "up", "--hosts", "2", "--", netlab.NETLAB, "exec", "h0", "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.stdout + done.stderr


def test_a_tensor_is_readable_between_hosts_only_without_encryption(tmp_path):
    said = run("estimator_wire", tmp_path)
    assert "encrypt=False: pattern True, bytes True" in said, said
    assert "encrypt=True: pattern False, bytes True" in said, said


@pytest.mark.slow
def test_a_spot_job_that_loses_a_host_ends_with_the_losses_of_an_undisturbed_run(tmp_path):
    said = run("estimator_spot", tmp_path)
    found = dict(re.findall(r"^(\w+): (\d restarts, losses .*)$", said, re.MULTILINE))
    assert found["undisturbed"].startswith("0 restarts"), said
    assert found["spot"] == found["undisturbed"].replace("0 restarts", "1 restarts", 1), said
    assert found["spot"].count(",") == 8
