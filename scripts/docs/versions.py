"""docs/reference/supported-versions.md: platforms, frameworks and launchers, and how each one is tested.

The data are in `versions.json`. Change a row there after the run of the target that it names.
"""

from __future__ import annotations

import json
from typing import Any

import writer

DATA = "scripts/docs/versions.json"


def _section(section: dict[str, Any]) -> str:
    parts = [f"## {section['title']}\n\n"]
    if "text" in section:
        parts.append(writer.paragraph(section["text"]))
    parts.append(writer.table(section["columns"], section["rows"]))
    parts += [writer.paragraph(note) for note in section.get("notes", [])]
    return "".join(parts)


def page() -> str:
    data = json.loads((writer.ROOT / DATA).read_text(encoding="utf-8"))
    parts = [
        writer.paragraph(
            f"Versions that smddp {data['release']} supports, and the test of each one. Each change runs `make test`; "
            "the other targets run on demand, and before a release."
        ),
        writer.console("$ smddp --version", f"smddp {data['release']}", "..."),
        *map(_section, data["sections"]),
        writer.links(
            ("Install smddp", "../get-started/install.md"),
            ("Versioning", "../project/versioning.md"),
            ("Releasing", "../project/releasing.md"),
        ),
    ]
    return writer.page("Supported versions and platforms", DATA, *parts)
