"""Parsed documentation pages: prose, links, headings, tables, commands and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: Folders of pages that have a task, for which stricter rules apply.
GUIDES = ("docs/guides/", "docs/get-started/", "docs/migrate/")
#: Pages outside of the site.
NOT_ON_THE_SITE = ("docs/pypi.md",)

_FENCE = re.compile(r"^( *)(```+|~~~+)[^\n]*\n.*?^\1\2[ ]*$", re.S | re.M)
_CODE_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```[ ]*$", re.S | re.M)
_INDENTED = re.compile(r"^    (?! *(?:[-*]|\d+\.) ).*$", re.M)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Table:
    line: int
    columns: int
    rows: int
    width: int


@dataclass(frozen=True)
class Link:
    is_image: bool
    words: str
    target: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_guide(self) -> bool:
        return self.name.startswith(GUIDES)

    @property
    def is_generated(self) -> bool:
        return "<!-- written by scripts/" in self.text

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text with as many lines, without code blocks and comments."""

        def blank(match: re.Match[str]) -> str:
            return "\n" * match[0].count("\n")

        return _COMMENT.sub(blank, _FENCE.sub(blank, self.text))

    @cached_property
    def words(self) -> str:
        """The prose without tables, indented code and inline code."""
        lines = [line for line in _INDENTED.sub("", self.prose).splitlines() if not line.lstrip().startswith("|")]
        return re.sub(r"`[^`\n]*`", "", "\n".join(lines))

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        return [(len(match[1]), match[2].strip()) for match in re.finditer(r"^(#+) +(.*)$", self.prose, re.M)]

    @property
    def title(self) -> str:
        return next((text for level, text in self.headings if level == 1), "")

    @cached_property
    def anchors(self) -> set[str]:
        found = set(re.findall(r"\{[:\s]*#([\w.-]+)", self.prose)) | set(re.findall(r'id="([^"]+)"', self.prose))
        slugs: dict[str, int] = {}
        for _, heading in self.headings:
            slug = slugified(heading)
            count = slugs.get(slug, 0)
            slugs[slug] = count + 1
            # The site appends _1, GitHub -1.
            found |= {slug} if not count else {f"{slug}_{count}", f"{slug}-{count}"}
        return found

    @cached_property
    def links(self) -> list[Link]:
        text = _INDENTED.sub("", re.sub(r"`[^`\n]*`", lambda match: match[0].replace("]", " "), self.prose))
        return [Link(bool(image), words, target) for image, words, target in _LINK.findall(text)]

    @cached_property
    def tables(self) -> list[Table]:
        found, block = [], []
        for number, line in enumerate([*self.prose.splitlines(), ""], 1):
            if line.lstrip().startswith("|"):
                block.append(line)
                continue
            if len(block) > 2:
                columns = len(re.split(r"(?<!\\)\|", block[0].strip().strip("|")))
                found.append(Table(number - len(block), columns, len(block) - 2, max(map(len, block))))
            block = []
        return found

    def blocks(self, language: str) -> list[str]:
        """Returns the code blocks of a language."""
        return [code for kind, code in _CODE_BLOCK.findall(self.text) if kind == language]

    @cached_property
    def commands(self) -> list[str]:
        """The command lines of console blocks and of indented blocks; continued lines are joined."""
        text = "\n".join(re.sub(r"^ *\$ ", "", line) for block in self.blocks("console") for line in _lines(block))
        text += "\n" + "\n".join(_INDENTED.findall(self.prose)) + "\n" + "\n".join(self.blocks("sh"))
        return [" ".join(line.split()) for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def _lines(block: str) -> Iterator[str]:
    """Yields the lines that begin with a prompt, and their continuations."""
    continued = False
    for line in block.splitlines():
        if continued or line.lstrip().startswith("$ "):
            yield line
            continued = line.endswith("\\")


def slugified(heading: str) -> str:
    """Returns the anchor that the site and GitHub give to a heading."""
    text = re.sub(r"\{[^}]*\}\s*$", "", heading)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip())


def all_pages() -> list[Page]:
    """Returns README.md, CONTRIBUTING.md and all pages of docs/."""
    return [Page(ROOT / "README.md"), Page(ROOT / "CONTRIBUTING.md"), *map(Page, sorted(DOCS.rglob("*.md")))]


def navigation() -> list[str]:
    """Returns the pages that mkdocs.yml shows, in order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ *- (?:[^:\n]+: )?([\w./-]+\.md)$", text, re.M)


def redirects() -> dict[str, str]:
    """Returns former pages and their replacements."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("redirect_maps:\n")[2]
    rows = re.match(r"(?: {8}.*\n)*", text)
    return dict(re.findall(r"^ {8}([\w./-]+\.md): (\S+)$", rows[0] if rows else "", re.M))
