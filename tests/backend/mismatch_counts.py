"""Counts of reported mismatches, for the table of `faults.mismatch`."""

from __future__ import annotations

import json
import os
from pathlib import Path

#: The folder into which ranks write. Nothing is written where it is not set.
FOLDER = "SMDDP_TEST_TALLY"


def count(kind: str, raised: bool, named: bool) -> None:
    """One pair of calls as this rank saw it: whether it raised, and whether the text names both calls."""
    if folder := os.environ.get(FOLDER):
        with (Path(folder) / os.environ["RANK"]).open("a") as file:
            file.write(json.dumps([kind, raised, named]) + "\n")


def take(folder: str) -> list[tuple[str, bool, bool]]:
    """Returns and removes the counts that all ranks have written."""
    found = []
    for path in Path(folder).iterdir():
        found += [tuple(json.loads(line)) for line in path.read_text().splitlines()]
        path.unlink()
    return found
