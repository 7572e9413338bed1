"""`dist.shrink_group` of the default group: three of four ranks go on, the fourth is dead or goes its own way."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist
from ranks.group import BACKEND

from faults import shrinking

pytestmark = [
    pytest.mark.skipif(BACKEND != "smddp", reason="other backends shrink in their own way"),
    pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="this torch shrinks no group of a backend in Python"),
]


def test_world_continues_without_a_dead_or_excluded_rank():
    done = subprocess.run([sys.executable, shrinking.__file__], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    for seconds in json.loads(done.stdout).values():
        assert max(seconds) < 5, (done.stdout, done.stderr)
