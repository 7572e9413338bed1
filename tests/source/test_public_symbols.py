"""The package has the public symbols on record, so a removal or a renamed parameter is always a decision."""

import difflib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_public_symbols_are_those_on_record():
    record = ROOT / "tests/source/public_symbols.txt"
    command = [sys.executable, str(ROOT / "scripts/public_symbols.py"), "torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    changes = difflib.unified_diff(
        record.read_text().splitlines(), done.stdout.splitlines(), "record", "now", lineterm=""
    )
    assert not (lines := list(changes)), "\n".join(
        [*lines, f"Intended: write {record.name} again; removals: CHANGELOG.md"]
    )
