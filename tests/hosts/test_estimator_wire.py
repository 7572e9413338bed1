"""`encrypt_inter_container_traffic` of an estimator, by the bytes on the wire between two hosts."""

import subprocess
import sys

from hosts import netlab


def test_a_tensor_is_readable_between_hosts_only_without_encryption(tmp_path):
    driver = netlab.job("estimator_wire")[-1]
    inside = [netlab.NETLAB, "exec", "h0", "--", sys.executable, driver, tmp_path, f"{netlab.NETLAB}-rsh"]
    command = [netlab.NETLAB, "up", "--hosts", "2", "--", *inside]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "encrypt=False: pattern True, bytes True" in done.stdout, done.stdout + done.stderr
    assert "encrypt=True: pattern False, bytes True" in done.stdout, done.stdout + done.stderr
