"""Rules of the documentation. Each returns what breaks it: page, line and reason.

tests/docs/rules.py            print what breaks each rule
tests/docs/rules.py --lower    write the present counts into ceilings.json where they are lower
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import site_pages
from site_pages import DOCS, ROOT, Page

CEILINGS = Path(__file__).with_name("ceilings.json")
LIMITS = Path(__file__).with_name("limits.json")
#: Limit of a guide that limits.json does not name.
DEFAULT_LIMIT = 150
Rule = Callable[[list[Page]], Iterator[str]]
RULES: dict[str, Rule] = {}

_FILE_NAME = re.compile(r"`?[\w./-]+\.(md|json|toml|py|rs|yml|yaml)`?(#.*)?")
_SETTING = re.compile(r"\bSMDDP_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
#: Names that are not settings: of tests, of the historic library, and of wheel builds.
_OTHER_NAMES = ("SMDDP_TEST_", "SMDDP_AG_")
_DOCS_PATH = re.compile(r"(?<![\w/.])docs/[\w./-]*\.(?:md|json|ya?ml|toml|svg|png)\b")
#: Pages that tests create elsewhere.
_MADE_UP = ("docs/results/old.md",)
_CODE_FOLDERS = ("crates", "python", "scripts", "tests", "bench", "examples", "docker", ".github", "fuzz", "models")
_CODE_FILES = ("Makefile", "pyproject.toml", "CONTRIBUTING.md", "SECURITY.md", "README.md", "CITATION.cff")
_RATE = re.compile(r"(?<![\w.])\d[\d,.]* ?(?:µs|us|ms|GB/s|MB/s|Gbit/s|Mbit/s)(?!\w)|\d ?÷|÷ ?\d")
_RELATIVE_WORDS = re.compile(
    r"(What|Who|Whom|Whose|Where|Whether|Why|How|When|Which|Now|Meanwhile|Last|Again|If|It|There|This)\b(?! it fails$)"
)
_PLACEHOLDER = re.compile(r"^(?:[A-Z][A-Z_]{2,}|.*\b(?:TODO|FIXME|TBD|XXX)\b.*)$", re.M)
_PROGRAMS = ("smddp", "smddprun", "smddp-bench")
#: Words that readers search for; each must be in the title of a page.
SEARCH_WORDS = (
    "install first multi-node mpirun slurm kubernetes container sagemaker gloo nccl mpi efa encryption ddp fsdp cuda "
    "compression determinism numpy keras profiler hang timeout troubleshooting prometheus logging trace "
    "fault benchmark tune scaling tensor expert context pipeline offloading checkpoint trainer horovod mpi4py "
    "settings errors versions changelog contributing releasing asked"
).split()


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


@rule
def links_lead_to_pages_and_anchors(pages: list[Page]) -> Iterator[str]:
    known = {page.path: page for page in pages}
    for page in pages:
        for link in page.links:
            if "://" in link.target or link.target.startswith("mailto:"):
                continue
            path, _, anchor = link.target.partition("#")
            target = (page.path.parent / path).resolve() if path else page.path
            if path and not target.exists():
                yield f"{page.name}: no file {link.target}"
            elif anchor and target.suffix == ".md" and anchor not in known.get(target, Page(target)).anchors:
                yield f"{page.name}: no anchor {link.target}"


@rule
def link_texts_are_words(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for link in page.links:
            if not link.is_image and _FILE_NAME.fullmatch(link.words):
                yield f"{page.name}: the text of a link is the file name {link.words}"


@rule
def pages_are_in_the_navigation_once(pages: list[Page]) -> Iterator[str]:
    shown = Counter(site_pages.navigation())
    for page in pages:
        if page.path.is_relative_to(DOCS) and page.name not in site_pages.NOT_ON_THE_SITE:
            name = page.path.relative_to(DOCS).as_posix()
            if shown[name] != 1:
                yield f"{page.name}: {shown[name]} entries in mkdocs.yml"


@rule
def navigation_and_redirects_lead_to_pages(pages: list[Page]) -> Iterator[str]:
    for name in site_pages.navigation():
        if not (DOCS / name).exists():
            yield f"mkdocs.yml: no page {name}"
    for old, new in site_pages.redirects().items():
        if not (DOCS / new.partition("#")[0]).exists():
            yield f"mkdocs.yml: {old} leads to {new}, which does not exist"
        if (DOCS / old).exists():
            yield f"mkdocs.yml: {old} is redirected, but exists"


@rule
def paths_of_pages_in_code_exist(pages: list[Page]) -> Iterator[str]:
    for name in _tracked():
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            for path in _DOCS_PATH.findall(line):
                if not (ROOT / path).exists() and path not in _MADE_UP:
                    yield f"{name}:{number}: {path}"


@cache
def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *_CODE_FOLDERS, *_CODE_FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    # Results name the pages that had them first.
    others = (Path(__file__).parent.relative_to(ROOT).as_posix(), "bench/results/")
    return [name for name in names if (ROOT / name).is_file() and not name.startswith(others)]


@rule
def names_of_settings_exist(pages: list[Page]) -> Iterator[str]:
    known = settings() | deprecated_settings()
    for page in pages:
        for name in sorted(set(_SETTING.findall(page.text)) - known):
            if not name.startswith(_OTHER_NAMES) and not any(one.startswith(f"{name}_") for one in known):
                yield f"{page.name}: {name} is not a setting"


@rule
def settings_have_an_anchor(pages: list[Page]) -> Iterator[str]:
    anchors = Page(DOCS / "reference" / "settings.md").anchors
    yield from (f"docs/reference/settings.md: no anchor {name}" for name in sorted(settings() - anchors))


@cache
def settings() -> set[str]:
    """Returns the names in the core's table."""
    text = (ROOT / "crates/smddp-core/src/config/mod.rs").read_text(encoding="utf-8")
    return set(re.findall(r"^    (SMDDP_\w+) = \"", text, re.M))


@cache
def deprecated_settings() -> set[str]:
    text = (ROOT / "crates/smddp-core/src/config/deprecated.rs").read_text(encoding="utf-8")
    return set(re.findall(r'name: "(SMDDP_\w+)"', text))


@rule
def exceptions_have_an_anchor(pages: list[Page]) -> Iterator[str]:
    path = DOCS / "reference" / "errors.md"
    anchors = Page(path).anchors if path.exists() else set()
    stubs = (ROOT / "python/smddp/_core.pyi").read_text(encoding="utf-8")
    for name in re.findall(r"^class (\w*Error)\(", stubs, re.M):
        if not {name, name.lower()} & anchors:
            yield f"docs/reference/errors.md: no anchor {name}"


@rule
def messages_with_a_hint_have_an_entry(pages: list[Page]) -> Iterator[str]:
    path = DOCS / "guides" / "troubleshooting.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    source = (ROOT / "python/smddp/torch/error_hints.py").read_text(encoding="utf-8")
    for words, _check in re.findall(r'^    \("([^"]+)", "([^"]+)"\),$', source, re.M):
        if words.strip() not in text:
            yield f"docs/guides/troubleshooting.md: no entry for {words.strip()!r}"


@rule
def options_in_pages_exist(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for command in page.commands:
            for program, option in _options(command):
                if option not in known_options(program):
                    yield f"{page.name}: {program} has no option {option}: {command}"


@cache
def known_options(program: str) -> set[str]:
    text = Page(DOCS / "reference" / "cli" / f"{program}.md").text
    rows = re.findall(r"^\| `(-[^`]*)` \|", text, re.M)
    return {word for row in rows for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", row)}


def _options(command: str) -> Iterator[tuple[str, str]]:
    """Yields the long options of our programs in a command line."""
    for part in re.split(r"\||&&|;|\s#\s|\s--(?:\s|$)", command):
        words = part.split()
        program = next((word for word in words if word in _PROGRAMS), None)
        if program is None:
            continue
        if words[words.index(program) :][1:2] == ["bench"]:
            program, words = "smddp-bench", ["smddp-bench", *words[words.index("bench") + 1 :]]
        after = words[words.index(program) + 1 :]
        for word in after:
            if program == "smddprun" and word.startswith(("python", "smddp", "./")):
                break
            if word.startswith("--") and len(word) > 2:
                yield program, word.partition("=")[0].rstrip(",.):")


@rule
def pages_are_within_their_limit(pages: list[Page]) -> Iterator[str]:
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    for page in pages:
        most = limits.get(page.name, DEFAULT_LIMIT if page.is_guide else None)
        lines = page.text.count("\n")
        if most is not None and lines > most:
            yield f"{page.name}: {lines} lines, limit {most}"


@rule
def tables_are_small(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if page.name.startswith("docs/reference/") or page.name in site_pages.NOT_ON_THE_SITE:
            continue
        for table in page.tables:
            if table.columns > 6 or table.rows > 20 or table.width > 220:
                size = f"{table.columns} columns, {table.rows} rows, {table.width} characters"
                yield f"{page.name}:{table.line}: {size}; most are 6, 20 and 220"


@rule
def tables_end_with_a_blank_line(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        lines = page.prose.splitlines()
        for number, (line, below) in enumerate(pairwise(lines), 2):
            if line.startswith("|") and below.strip() and not below.startswith("|"):
                yield f"{page.name}:{number}: the text becomes a row of the table above"


@rule
def lines_are_short(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if page.is_generated:
            continue
        for number, line in enumerate(page.prose.splitlines(), 1):
            if len(line) > 100 and not line.lstrip().startswith(
                ("|", "http", "![", ":::", "<", "options:", "members:")
            ):
                yield f"{page.name}:{number}: {len(line)} characters"


@rule
def guides_begin_with_a_command(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if page.is_guide:
            first = re.search(r"^(    \S| *```)", page.text, re.M)
            if first is None or page.text[: first.start()].count("\n") > 25:
                yield f"{page.name}: no command in the first 25 lines"


@rule
def headings_begin_with_a_noun_or_a_verb(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for _, heading in page.headings:
            if _RELATIVE_WORDS.match(heading) and not page.name.startswith("docs/results/"):
                yield f"{page.name}: {heading}"


@rule
def guides_end_with_next(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if page.is_guide and (not page.headings or page.headings[-1][1] != "Next"):
            yield f"{page.name}: the last section is not 'Next'"


@rule
def searched_words_are_in_titles(pages: list[Page]) -> Iterator[str]:
    titles = " ".join(page.title.lower() for page in pages)
    yield from (f"no title contains {word!r}" for word in SEARCH_WORDS if word not in titles)


@rule
def retired_words_are_not_used(pages: list[Page]) -> Iterator[str]:
    spec = importlib.util.spec_from_file_location("retired_words", ROOT / "tests/source/test_retired_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page in pages:
        for number, line in enumerate(page.prose.splitlines(), 1):
            for match in module.RETIRED.finditer(re.sub(r"`[^`]*`", "", line).lower()):
                yield f"{page.name}:{number}: {match[1]}"


@rule
def sentences_of_guides_are_short(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if not page.is_guide:
            continue
        for sentence in re.split(r"(?<=[.:!?])\s+|\n\n|\n\s*(?:[-*#]|\d+\.) ?", page.words):
            count = len(re.findall(r"[A-Za-z]{2,}", sentence))
            if count > 35:
                yield f"{page.name}: {count} words: {' '.join(sentence.split())[:60]}"


@rule
def measured_figures_link_to_results(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        if page.is_guide:
            for paragraph in re.split(r"\n\s*\n", page.words):
                figure = _RATE.search(paragraph)
                if figure and "results/" not in paragraph:
                    yield f"{page.name}: {figure[0]} without a link to a results page"


@rule
def python_blocks_compile(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for code in page.blocks("python"):
            code = re.sub(r",\s*\.\.\.(?=\s*[)\]}])", "", code)
            try:
                compile(code, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                yield f"{page.name}: {error.msg}: {(error.text or '').strip()}"


@rule
def pages_have_no_placeholder(pages: list[Page]) -> Iterator[str]:
    for page in pages:
        for found in _PLACEHOLDER.findall(page.words):
            yield f"{page.name}: {found}"


@rule
def versions_are_those_of_the_release(pages: list[Page]) -> Iterator[str]:
    described = json.loads((ROOT / "scripts/docs/versions.json").read_text(encoding="utf-8"))["release"]
    text = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    current = re.findall(r'^version = "(.+)"', text, re.M)
    if current != [described]:
        yield f"scripts/docs/versions.json: release {described}, Cargo.toml has {current}"


def main(arguments: list[str]) -> int:
    pages = site_pages.all_pages()
    ceilings = json.loads(CEILINGS.read_text(encoding="utf-8"))
    for name, check in RULES.items():
        found = list(check(pages))
        if "--lower" in arguments:
            ceilings[name] = min(len(found), ceilings.get(name, 0))
            continue
        print(f"{len(found):5d}  {name} (at most {ceilings.get(name, 0)})")
        print("".join(f"           {line}\n" for line in found), end="")
    if "--lower" in arguments:
        kept = {name: most for name, most in ceilings.items() if name in RULES and most}
        CEILINGS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
