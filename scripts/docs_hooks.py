"""What the documentation's site does to a page that the repository does not need: links to files outside of docs/."""

import re
from typing import Any

#: `](../FILE)`: relative to the repository's root from a page of docs/.
_OUTSIDE = re.compile(r"\]\(\.\./(?!\.)([^)]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if "/" in page.file.src_uri:
        return markdown
    return _OUTSIDE.sub(rf"]({config['extra']['social'][0]['link']}/blob/main/\1)", markdown)
