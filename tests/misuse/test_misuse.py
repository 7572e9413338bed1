"""Every mistake is reported with a remedy, without a traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mistakes import CASES


@pytest.fixture(scope="module")
def outcomes():
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("mistakes.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_there_are_sixty_and_more():
    assert len(CASES) >= 60


@pytest.mark.parametrize("name", CASES)
def test_mistake_is_reported(outcomes, name):
    ends, said = outcomes[name]
    case = CASES[name]
    missing = [word for word in case.words if word not in said]
    assert (ends, missing) == (case.ends, []), said
    assert "Traceback" not in said
