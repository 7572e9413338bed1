"""The screens of the guides are what the commands print here."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"


def screens(page: Path) -> dict[str, str]:
    """Returns the output of each console block, by the command."""
    return dict(re.findall(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S))


def regenerated(name: str, folder: Path) -> dict[str, str]:
    page = Path(shutil.copy(GUIDES / name, folder))
    subprocess.run([sys.executable, str(ROOT / "scripts" / "screens.py"), str(page)], check=True, timeout=200)
    return screens(page)


@pytest.mark.slow
def test_status_screen_is_generated_from_a_hanging_job(tmp_path: Path):
    screen = regenerated("debug-a-hang.md", tmp_path)["smddp status"]
    assert len(re.findall(r"all_reduce #\d+ +\d+\.\d s ", screen)) == 3, screen
    assert re.search(r"\n3 .* train.py:\d+ in read_batch < train.py", screen), screen
    verdict = r"all_reduce #\d+ of group `0` has waited [\d.]+ s for rank 3 .*, which is in read_batch"
    assert re.match(verdict, screen), screen
    assert "\nhistory: rank 1 was last in" in screen and screen.count("\n") == 7, screen


@pytest.mark.slow
def test_trace_and_replay_are_generated_from_a_hanging_job(tmp_path: Path):
    found = regenerated("traces-and-replay.md", tmp_path)
    assert "of 4 processes" in found["smddp trace dumps -o trace.json"]
    assert "# reproduced: hanging in all_reduce #" in found["smddp-bench replay dumps --timeout 2"]
    assert (tmp_path / "trace.svg").read_text().count("<title>all_reduce") > 40


def test_plan_is_generated_with_its_drawing(tmp_path: Path):
    command = "smddp-bench explain all_gather --bytes 256K --nodes 2 --ppn 2 --draw tune-plan.svg"
    screen = regenerated("tune.md", tmp_path)[command]
    assert screen.startswith("all_gather of 256K on 2 nodes, 4 ranks") and "drawn: tune-plan.svg" in screen, screen
    assert (tmp_path / "tune-plan.svg").read_text().startswith("<svg")
