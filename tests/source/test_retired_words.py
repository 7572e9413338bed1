"""Words that the project does not use: its code and texts have the field's terms instead."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Files that contain the words on purpose.
LISTS = [Path(__file__).resolve(), ROOT / "tests/docs/test_documentation.py"]
WORDS = (
    "whoever|whomever|somebody|nobody|anybody|told|tells|untold|hush|owed|unheld|hail|knock|drowse|rouse|belt|vain|kicks|crowd|mates|outlets?"
    "|inlets?|landing|let_go|poison|last_words|nonsense|spoiled|strangers?|doors?|chief|stir|telling|standins|selfsend|arrears|wishes"
)
RETIRED = re.compile(rf"(?<![A-Za-z])({WORDS})(?![A-Za-z])")
FOLDERS = ["crates", "models", "fuzz/targets", "python", "tests", "examples", "bench", "scripts"]


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout: the list of files is unknown")
    return [
        name for name in listed.stdout.split() if name.endswith((".rs", ".py", ".pyi")) and ROOT / name not in LISTS
    ]


def test_retired_words_are_not_used():
    found = []
    for name in _tracked():
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            words = {match[1] for match in RETIRED.finditer(line)}
            found += [f"{name}:{number}: {word}" for word in sorted(words)]
    assert not found, "\n".join(found)
