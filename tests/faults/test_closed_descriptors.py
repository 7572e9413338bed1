"""A program that closes all file descriptors while its groups are open, as daemons do before they exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import datetime, os, sys
import torch, torch.distributed as dist, smddp
rank, store = int(sys.argv[1]), sys.argv[2]
limit = datetime.timedelta(seconds=20)
dist.init_process_group("smddp", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
dist.all_reduce(torch.ones(400000))
os.closerange(3, 65536)
try:
    if rank == 0:
        dist.all_reduce(torch.ones(400000))
    else:
        dist.destroy_process_group()
except smddp.Error as error:
    print(type(error).__name__)
"""


def test_a_process_that_closed_all_descriptors_ends(tmp_path: Path):
    """One rank is in a collective, the other one destroys the group. Both exit without a hang or a signal."""
    processes = {}
    for wire in ("shm", "tcp"):
        for rank in (0, 1):
            node = f"node{rank}" if wire == "tcp" else "node"
            environment = {**os.environ, "SMDDP_NODE": node, "SMDDP_SOCKET_IFNAME": "lo"}
            command = [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / wire)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes[wire, rank] = subprocess.Popen(command, env=environment, text=True, **pipes)
    try:
        for cell, process in processes.items():
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, (cell, process.returncode, out, err)
            errors = ("PeerLostError\n",) if cell[1] == 0 else ("", "PeerLostError\n")
            assert out in errors, (cell, out, err)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
