"""The failure monitor evaluates plain data: it reads no clock, does not block, and has no access to the group."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "crates" / "smddp-core" / "src" / "failure"
FILES = sorted([*FOLDER.glob("*.rs"), *FOLDER.glob("monitor/*.rs")])
FORBIDDEN = re.compile(
    r"Instant::now|SystemTime|elapsed\(|sleep|park|Mutex|lock\(|std::(fs|io|net|thread)\b|\bGroup\b|\bEngine\b|record_error"
)


def offences(text: str) -> list[str]:
    """Return the forbidden uses in code; comments may name them."""
    return [found.group() for line in text.splitlines() for found in FORBIDDEN.finditer(line.split("//")[0])]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_have_no_clock_and_no_io(file: Path) -> None:
    assert offences(file.read_text()) == []


def test_forbidden_uses_are_found() -> None:
    assert {file.name for file in FILES} >= {"monitor.rs", "deadlines.rs", "error_text.rs", "straggler_query.rs"}
    assert offences("let now = Instant::now(); // sleep") == ["Instant::now"]
    assert offences("std::thread::sleep(since.elapsed());") == ["std::thread", "sleep", "elapsed("]
    assert offences("fn of(group: &GroupNames)") == []
