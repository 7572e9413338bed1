"""The checks for GPUs run: one part on CPU tensors, and all parts on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check.py")


def checked(*arguments: str, seconds: float) -> str:
    done = subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_invalid_input_is_checked_on_cpu_tensors():
    assert checked("--device", "cpu", "--part", "bad", seconds=90).startswith("PASS: 5 passed, 0 failed, 3 not run")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_parts_pass_on_a_gpu():
    assert ", 0 failed" in checked(seconds=1400)
