"""Extraction of the shell commands and Python scripts from the introductory pages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
_ANY_FENCE = re.compile(r"^```.*?^```$", re.S | re.M)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.S | re.M)
_INDENTED = re.compile(r"^    (\S.*)$", re.M)
_CELL = re.compile(r"`([^`]+)`")
#: What begins a command, also in a table, where names of files and settings stand in the same type.
_PROGRAMS = ("docker", "make", "mpirun", "pip", "python", "smddp", "smddp-bench", "smddprun", "srun", "torchrun", "uv")


def scripts(page: str) -> list[str]:
    """Returns the page's Python blocks, in order."""
    return _FENCE.findall((ROOT / page).read_text())


def commands(page: str) -> list[str]:
    """Returns the page's shell commands without trailing comments: lines of console blocks, indented lines, cells."""
    page_text = (ROOT / page).read_text()
    text = _ANY_FENCE.sub("", page_text)
    shown = [line[2:] for block in _CONSOLE.findall(page_text) for line in block.splitlines() if line.startswith("$ ")]
    lines = [*shown, *_INDENTED.findall(text)]
    in_tables = [words for row in re.findall(r"^\|.*\|$", text, re.M) for words in _CELL.findall(row)]
    in_text = [words for line in text.splitlines() if not line.startswith(("|", " ")) for words in _CELL.findall(line)]
    commands_found = [*lines, *(words for words in (*in_tables, *in_text) if _begins_a_command(words))]
    return list(dict.fromkeys(re.split(r"\s+#\s", line)[0].strip() for line in commands_found))


def _begins_a_command(words: str) -> bool:
    first, _, rest = words.partition(" ")
    return first in _PROGRAMS and bool(rest)
