"""The documentation's pages are found and their links lead somewhere; `make docs-site` builds them strictly."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/smddp/smddp"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "pypi.md")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```|^    .*?$|`[^`\n]*`", re.S | re.M)


def test_every_page_is_in_the_sites_navigation_and_in_the_list_of_pages():
    listed = (ROOT / "docs" / "README.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f"- {name}\n" in navigation, f"mkdocs.yml does not name {name}"
        if "/" not in name and name != "README.md":
            assert f"]({name})" in listed, f"docs/README.md does not name {name}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page):
    for words in LINK.findall(FENCE.sub("", page.read_text())):
        target = (words[0] or words[1]).partition("#")[0]
        if target and "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} leads to {target}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_no_page_has_a_placeholder(page):
    text = FENCE.sub("", page.read_text())
    assert re.findall(r"^(?:[A-Z][A-Z_]{2,}|.*\b(?:TODO|FIXME|TBD)\b.*)$", text, re.M) == []


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("README.md", "../CONTRIBUTING.md", f"{REPOSITORY}/blob/main/CONTRIBUTING.md"),
        ("results/gpu.md", "../../bench/results/gpu.json", f"{REPOSITORY}/blob/main/bench/results/gpu.json"),
        ("results/gpu.md", "../performance.md#measure", "../performance.md#measure"),
    ],
)
def test_links_of_the_site_to_files_outside_of_docs_lead_to_the_repository(page, link, on_the_site, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.delitem(sys.modules, "docs_hooks", raising=False)
    import docs_hooks

    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert docs_hooks.on_page_markdown(f"[x]({link})", place, config=None) == f"[x]({on_the_site})"
