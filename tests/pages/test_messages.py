"""Each heading of the troubleshooting page is a text of the code."""

from __future__ import annotations

import re

import pytest
import reading

PAGE = reading.ROOT / "docs/guides/troubleshooting.md"
#: Messages of other programs and calls.
FOREIGN = (
    "No matching distribution found for torch",
    "is not a supported wheel on this platform",
    "Unknown backend type smddp",
    "The server socket has failed to listen on any local network address",
    "EADDRINUSE",
    "Too many open files",
    "Root Cause (first observed failure)",
    "No module named 'torch.sagemaker'",
    "hybrid_shard_degree",
)


def headings() -> list[str]:
    """Returns the texts in the headings of the third level, one for each message."""
    lines = re.findall(r"^### (.*)$", PAGE.read_text(), re.M)
    return [text for line in lines for text in re.findall(r"`([^`]+)`", line)]


@pytest.fixture(scope="module")
def sources() -> str:
    """All source text, with the continuation lines of Rust strings joined."""
    folders = ("crates", "python", "scripts")
    files = [
        path
        for folder in folders
        for path in (reading.ROOT / folder).rglob("*")
        if path.suffix in (".rs", ".py", ".sh")
    ]
    text = "\n".join(path.read_text() for path in files) + (reading.ROOT / "Makefile").read_text()
    return re.sub(r"\\\n\s*", "", text)


@pytest.mark.parametrize("heading", headings())
def test_each_heading_is_a_text_of_the_code(heading: str, sources: str):
    if heading in FOREIGN:
        return
    # "..." and numbers of an example stand for any text.
    parts = [part.strip(" ()") for part in re.split(r"\.\.\.|\b\d+(?:\.\d+)?\b|\b[NM]\b", heading)]
    missing = [part for part in parts if len(part) > 3 and part not in sources]
    assert not missing, missing
