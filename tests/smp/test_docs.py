"""The scripts in docs/guides/smp run as written, in the ranks of a pool; `make test-slow` starts them by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PAGES = Path(__file__).parents[2] / "docs" / "guides" / "smp"
FEATURES = """activation-offloading context-parallelism delayed-initialization expert-parallelism hybrid-sharding
    tensor-parallelism""".split()
_SCRIPT = re.compile(r"^<!-- a script for (\d+) ranks -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def scripts() -> list:
    found = [(page.stem, match) for page in sorted(PAGES.glob("*.md")) for match in _SCRIPT.findall(page.read_text())]
    return [pytest.param(int(ranks), code, id=page) for page, (ranks, code) in found]


def test_each_feature_page_holds_a_script():
    assert [script.id for script in scripts()] == FEATURES


@pytest.mark.slow
@pytest.mark.parametrize(("size", "code"), scripts())
def test_a_script_of_the_page_runs_under_torchrun(size, code, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, str(script)], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize(("size", "code"), scripts())
def test_a_script_of_the_page_runs(ranks, size, code, tmp_path):
    assert size == ranks.size
    script = tmp_path / "script.py"
    script.write_text(code)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks.run("ranks.script", "as_torchrun_would", path=str(script), port=store.port, library="torch.sagemaker")
