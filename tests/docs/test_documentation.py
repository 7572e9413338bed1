"""The pages of the documentation follow rules.py, and generated pages equal their sources.

`ceilings.json` has the number of places that may break a rule. It may only fall: `python tests/docs/rules.py --lower`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import rules
import site_pages
from site_pages import DOCS, ROOT, Page

REPOSITORY = "https://github.com/smddp/smddp"
CEILINGS: dict[str, int] = json.loads(rules.CEILINGS.read_text())


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    return site_pages.all_pages()


@pytest.mark.parametrize("name", rules.RULES)
def test_pages_break_a_rule_in_no_new_place(name: str, pages: list[Page]):
    found = list(rules.RULES[name](pages))
    most = CEILINGS.get(name, 0)
    assert len(found) <= most, f"{len(found)} places, at most {most}:\n" + "\n".join(found)


def test_ceilings_are_those_of_rules():
    assert CEILINGS.keys() <= rules.RULES.keys()


def made_up(text: str, name: str = "guides/made-up.md") -> Page:
    page = Page(DOCS / name)
    page.__dict__["text"] = text
    return page


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("links_lead_to_pages_and_anchors", "[there](nowhere.md)\n"),
        ("links_lead_to_pages_and_anchors", "# A\n\n[there](#b)\n"),
        ("link_texts_are_words", "[settings.md](../reference/settings.md)\n"),
        ("pages_are_in_the_navigation_once", "# A\n"),
        ("names_of_settings_exist", "Set `SMDDP_TIMEOUT=3`.\n"),
        ("options_in_pages_exist", "```console\n$ smddp status --wach\n```\n"),
        ("options_in_pages_exist", "    smddprun --procs 4 python train.py --steps 3\n"),
        ("options_in_pages_exist", "```console\n$ RANK=0 smddp bench all_reduce \\\n    --minimum 8\n```\n"),
        ("pages_are_within_their_limit", "line\n" * 151),
        ("tables_are_small", "| a | b | c | d | e | f | g |\n" + "|---" * 7 + "|\n" + "| 1 " * 7 + "|\n"),
        ("tables_end_with_a_blank_line", "| a |\n|---|\n| 1 |\ntext\n"),
        ("lines_are_short", "word " * 21 + "\n"),
        ("guides_begin_with_a_command", "# A\n" + "\n" * 30 + "    make test\n"),
        ("headings_begin_with_a_noun_or_a_verb", "## What it does\n"),
        ("guides_end_with_next", "# A\n\n## Next\n\n## B\n"),
        ("retired_words_are_not_used", "Nobody is told.\n"),
        ("sentences_of_guides_are_short", "word " * 36 + ".\n"),
        ("measured_figures_link_to_results", "A call takes 14 us.\n"),
        ("python_blocks_compile", "```python\nif:\n```\n"),
        ("pages_have_no_placeholder", "COUNTS\n"),
    ],
)
def test_rule_finds_a_broken_place(name: str, text: str):
    assert list(rules.RULES[name]([made_up(text)]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "links_lead_to_pages_and_anchors",
            "# A b\n\n[b](#a-b) and [settings](../reference/settings.md#SMDDP_DEBUG)\n",
        ),
        ("link_texts_are_words", "[Settings](../reference/settings.md)\n"),
        ("names_of_settings_exist", "`SMDDP_DEBUG`, `SMDDP_SHM`, `SMDDP_METRICS_*` and `SMDDP_AG_OLD`.\n"),
        ("options_in_pages_exist", "```console\n$ smddprun --nproc 4 python train.py --steps 3\n--no-option\n```\n"),
        ("options_in_pages_exist", "```console\n$ smddp launch train.py -n 2 --dry-run -- --steps 3\n```\n"),
        ("lines_are_short", "```text\n" + "word " * 30 + "\n```\n"),
        ("measured_figures_link_to_results", "It takes 14 us ([results](../results/one-host.md)).\n"),
        ("retired_words_are_not_used", "`nobody` is a user of Linux.\n"),
    ],
)
def test_rule_accepts_a_right_place(name: str, text: str):
    assert list(rules.RULES[name]([made_up(text)])) == []


def test_generated_pages_equal_their_sources():
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed: pip install 'smddp[metrics]'")
    script = ROOT / "scripts" / "docs" / "generate.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


def test_navigation_and_redirects_are_read_from_mkdocs_yml():
    assert len(site_pages.navigation()) > 50 and len(site_pages.redirects()) > 20


def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_the_site(page: str, markdown: str) -> str:
    return hooks().on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)), config=None)


@pytest.mark.parametrize(
    ("page", "link", "target"),
    [
        ("index.md", "../CONTRIBUTING.md", f"{REPOSITORY}/blob/main/CONTRIBUTING.md"),
        ("results/gpu.md", "../../bench/results/gpu.json", f"{REPOSITORY}/blob/main/bench/results/gpu.json"),
        ("results/gpu.md", "../guides/tune.md#measure", "../guides/tune.md#measure"),
        ("index.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_of_the_site_to_files_outside_of_docs_lead_to_the_repository(page: str, link: str, target: str):
    assert on_the_site(page, f"[x]({link})") == f"[x]({target})"


def test_site_shows_files_of_the_root_folder():
    path = DOCS / "project" / "contributing.md"
    shown = on_the_site("project/contributing.md", path.read_text())
    assert "`make check`" in shown and "](../architecture.md)" in shown
