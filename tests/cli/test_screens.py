"""The screens of the docs are what a live job shows."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_status_page_is_generated_from_a_hanging_job(tmp_path: Path):
    page = Path(shutil.copy(ROOT / "docs" / "observability.md", tmp_path))
    subprocess.run([sys.executable, str(ROOT / "scripts" / "screens.py"), str(page)], check=True, timeout=200)
    (screen,) = re.findall(r"```text\n(.*?)```", page.read_text(), re.S)
    assert len(re.findall(r"all_reduce #\d+ +\d+\.\d s ", screen)) == 3, screen
    assert re.search(r"\n3 .* train.py:\d+ in read_batch < train.py", screen), screen
    verdict = r"all_reduce #\d+ of group `0` has waited [\d.]+ s for rank 3 .*, which is in read_batch"
    assert re.match(verdict, screen), screen
    assert "\nhistory: rank 1 was last in" in screen and screen.count("\n") == 7, screen
    assert (tmp_path / "trace.svg").read_text().count("<title>all_reduce") > 40
