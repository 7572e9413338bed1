"""torchx starts our ranks: its own component for torchrun, on this machine."""

import os
import shutil
import subprocess

import pytest

SUM = """
import torch, torch.distributed as dist
dist.init_process_group("smddp")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2, 2, 2]
dist.destroy_process_group()
"""


def test_the_local_scheduler_runs_a_job(tmp_path):
    torchx = shutil.which("torchx")
    if torchx is None:
        pytest.skip("torchx is not installed: make test-launch")
    (tmp_path / "script.py").write_text(SUM)
    command = [torchx, "run", "-s", "local_cwd", "--wait", "--log", "dist.ddp", "-j", "1x2", "--script", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "SUCCEEDED" in done.stderr, done.stdout + done.stderr
