"""Odd command lines and files: each ends in time, with one error line and the documented exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import odd_cases
from cli.command_runner import LIMIT
from cli.test_dumps import dump

#: Lines on standard error of one case.
_MOST_LINES = 2


def run(cases: list[odd_cases.Case], folder: Path) -> list[dict[str, Any]]:
    """Returns status and output of each case."""
    given = [
        {"program": c.program, "words": c.words, "folder": str(folder), "environment": c.environment} for c in cases
    ]
    runner = Path(__file__).with_name("command_runner.py")
    # Variables of a launcher of the tests would make each case a rank of its job.
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, runner], input=json.dumps(given), capture_output=True, text=True, timeout=300, env=kept
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def problem(case: odd_cases.Case, found: dict[str, Any]) -> str | None:
    """Returns how the outcome of a case differs from the documented one, or None."""
    text = found["stdout"] + found["stderr"]
    if found["status"] == -14:
        return f"still running after {LIMIT} s"
    if found["status"] not in case.statuses:
        return f"exit status {found['status']}, expected {case.statuses}"
    if any(word in text for word in ("Traceback", "panicked", "Error:", "Errno", "os error 0")):
        return "a traceback, or the name of an exception"
    # Both print problems as a part of their normal output.
    if found["status"] == 1 and case.words[:1] in (("info",), ("status",)):
        return None
    lines = [line for line in found["stderr"].splitlines() if line.strip()]
    if not 1 <= len(lines) <= _MOST_LINES:
        return f"{len(lines)} lines on standard error"
    return None


def test_each_odd_command_line_and_file_is_one_error_line_and_the_documented_status(tmp_path: Path):
    files = odd_cases.write_files(tmp_path)
    files["valid-dump"] = tmp_path / "valid-dump.json"
    files["valid-dump"].write_text(json.dumps(dump()))
    cases = [*odd_cases.command_lines(), *odd_cases.with_files(files)]
    assert len(cases) >= 200
    # One runner: another one would spend seconds of processor time on imports.
    pairs = zip(cases, run(cases, tmp_path), strict=True)
    wrong = [
        f"{case.program} {' '.join(map(ascii, case.words))[:300]} {case.environment or ''}\n    {why}: {found}"[:1500]
        for case, found in pairs
        if (why := problem(case, found))
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)
    assert {case.program for case in cases} >= {"smddp", "smddp-bench", "smddprun"}


if __name__ == "__main__":
    pytest.main([__file__, "-q"])
