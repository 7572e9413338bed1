"""Changes of pages for the documentation's site: links to files outside of docs/ become links to the repository."""

import posixpath
import re
from typing import Any

REPOSITORY = "https://github.com/smddp/smddp"
#: `](../FILE)`, with one `../` or more.
_UPWARD = re.compile(r"\]\(((?:\.\./)+[^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return match[0] if path.startswith("docs/") else f"]({REPOSITORY}/blob/main/{path})"

    return _UPWARD.sub(outside, markdown)
