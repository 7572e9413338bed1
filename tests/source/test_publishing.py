"""Consistency of the published metadata, and validity of its links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/smddp/smddp"
PUBLISHED = [
    "pyproject.toml",
    "docs/pypi.md",
    "docs/project/releasing.md",
    "SECURITY.md",
    "CITATION.cff",
    ".github/ISSUE_TEMPLATE/config.yml",
]


def version(file: str, pattern: str) -> str:
    return re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)[1]


def test_all_files_have_one_version():
    versions = {
        version("Cargo.toml", r'^version = "(.+)"'),
        version("pyproject.toml", r'^version = "(.+)"'),
        version("CITATION.cff", r"^version: (.+)"),
    }
    assert len(versions) == 1, versions


@pytest.mark.parametrize("file", PUBLISHED)
def test_links_to_the_repository_lead_to_files(file: str):
    for url in re.findall(rf"{REPOSITORY}[^\s\"')>]*", (ROOT / file).read_text()):
        path = url.removeprefix(REPOSITORY)
        if path.startswith("/blob/main/"):
            name, _, heading = path.removeprefix("/blob/main/").partition("#")
            text = (ROOT / name).read_text()
            headings = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in text.splitlines()]
            assert not heading or heading in headings, url
        else:
            assert path in ("", "/issues", "/security/advisories/new"), url


def test_the_index_s_page_has_no_relative_link():
    assert re.findall(r"\]\((?!https://)[^)]*\)", (ROOT / "docs/pypi.md").read_text()) == []


def test_workflows_call_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    workflows = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    called = set(re.findall(r"run: make ([\w-]+)", workflows))
    assert {"check", "test", "wheel-portable", "wheel-aarch64", "check-package"} <= called
    assert [target for target in called if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("beginning", ["smddp is a collective-communication library", "**Status: ", "```python"])
def test_the_index_s_page_agrees_with_the_readme(beginning: str):
    def paragraphs(file: str) -> list[str]:
        blocks = re.findall(r"^```python\n.*?^```$|^\S.*?(?=\n\n|\Z)", (ROOT / file).read_text(), re.M | re.S)
        return [re.sub(r" \(\[.*\)", "", " ".join(block.split())) for block in blocks if block.startswith(beginning)]

    assert paragraphs("docs/pypi.md") == paragraphs("README.md") != []


def test_the_readme_has_at_most_100_lines_and_the_first_commands_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100
    first_screen = "\n".join(lines[:25])
    assert "    make demo" in first_screen and "    make test" in first_screen
