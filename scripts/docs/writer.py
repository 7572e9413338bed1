"""Markdown of generated reference pages, and their comparison with the committed files."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cell(text: object) -> str:
    """Returns the text of a table's cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def code(text: object) -> str:
    """Returns inline code; `-` for an empty text."""
    return f"`{text}`" if str(text) else "-"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table with the blank line that must follow it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines) + "\n"


def paragraph(text: str, begin: str = "", indent: str = "") -> str:
    """Returns a wrapped paragraph with the blank line that follows it."""
    words = textwrap.fill(
        text,
        100,
        initial_indent=begin,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{words}\n\n"


def sentence(text: str) -> str:
    """Returns the text with a capital letter at its beginning and a full stop at its end."""
    whole = " ".join(text.split())
    if re.match(r"[a-z]+\b(?![_.(])", whole):
        whole = whole[0].upper() + whole[1:]
    return whole if whole.endswith((".", "!", "?", ":")) else f"{whole}."


def console(*lines: str) -> str:
    return "```console\n" + "".join(f"{line}\n" for line in lines) + "```\n\n"


def entry(name: str, text: str, facts: Mapping[str, object], notes: Sequence[str] = ()) -> str:
    """Returns the section of one name: heading, anchor with the exact name, description, facts and notes."""
    parts = [f'<a id="{name}"></a>\n\n', f"### {name}\n\n", paragraph(text), table([*facts], [[*facts.values()]])]
    return "".join([*parts, *map(paragraph, notes)])


def page(title: str, source: str, *parts: str) -> str:
    """Returns a page. `source` names the files that it is made from."""
    head = f"# {title}\n\n<!-- written by scripts/docs/generate.py from {source} -->\n\n"
    return (head + "".join(parts)).rstrip("\n") + "\n"


def links(*pairs: tuple[str, str]) -> str:
    """Returns the last section."""
    return "## Next\n\n" + "".join(f"- [{title}]({target})\n" for title, target in pairs)


def stale(root: Path, pages: Mapping[str, str]) -> list[str]:
    """Returns the paths of pages that differ from the committed files."""
    return [name for name, text in pages.items() if not _equals(root / name, text)]


def _equals(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def write(root: Path, pages: Mapping[str, str]) -> list[str]:
    """Writes the pages that differ, and returns their paths."""
    changed = stale(root, pages)
    for name in changed:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[name], encoding="utf-8")
    return changed
