"""MkDocs hooks: links from docs/ to other files lead to the repository, and two pages show files of the root folder."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/smddp/smddp"
#: Relative link with its optional anchor.
_LINK = re.compile(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)")
#: Line of a page that the site replaces, with all other lines, by a file of the root folder.
_SHOWN = re.compile(r"^<!-- the site shows ([\w.]+) here -->$", re.M)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links that the site can follow."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    shown = _SHOWN.search(markdown)
    base = "" if shown else folder
    text = (ROOT / shown[1]).read_text(encoding="utf-8") if shown else markdown

    def on_the_site(match: re.Match[str]) -> str:
        path, anchor = posixpath.normpath(posixpath.join(base, match[1])), match[2] or ""
        if not path.startswith("docs/"):
            return f"]({REPOSITORY}/blob/main/{path}{anchor})"
        return f"]({posixpath.relpath(path, folder)}{anchor})" if shown else match[0]

    return _LINK.sub(on_the_site, text)
