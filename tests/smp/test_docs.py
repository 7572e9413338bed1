"""The scripts in docs/smp.md run as written, in the ranks of a pool; `make test-slow` has torchrun start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch.distributed as dist

PAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "docs", "smp.md")
_SCRIPT = re.compile(
    r"^### ([^\n]+)\n(?:(?!^###).)*?<!-- a script for (\d+) ranks -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def scripts() -> list:
    with open(PAGE, encoding="utf-8") as page:
        return [pytest.param(int(ranks), code, id=title) for title, ranks, code in _SCRIPT.findall(page.read())]


def test_the_page_holds_a_script_for_each_of_the_five_features():
    assert len(scripts()) >= 5


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
