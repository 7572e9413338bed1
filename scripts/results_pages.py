"""Writes docs/results/ and the README's table of results from the JSON files in bench/results/.

  scripts/results_pages.py            write them
  scripts/results_pages.py --check    exit 1 when one of them differs from what the files give

A file holds the runs of one question (machine, versions, commit, command, columns, rows) and the parts of its page that
need words. bench/results/README.md describes the keys. Invalid input: one line on stderr, exit 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from smddp.observability import svg

ROOT = Path(__file__).resolve().parents[1]
MOST_ROWS, MOST_COLUMNS = 12, 6
#: Pages of docs/results/ that no file of bench/results/ gives.
HANDWRITTEN = ("method.md",)
#: Keys that an object must have, and the type of each value; object: any type.
NEEDED: Mapping[str, type] = {
    **dict.fromkeys(("page", "title", "question", "answer"), str),
    **dict.fromkeys(("tables", "slower", "slower_notes", "limits", "runs"), list),
    "repeat": dict,
}
NEEDED_OF_RUN: Mapping[str, type] = {
    **dict.fromkeys(("id", "title"), str),
    **dict.fromkeys(("machine", "versions", "commit", "date", "recorded", "command", "method"), object),
    **dict.fromkeys(("columns", "rows"), list),
}
NEEDED_OF_INDEX: Mapping[str, type] = {"title": str, "text": str, "pages": list, "summary": dict, "repeat": dict}
#: The same, in the words of JSON.
JSON_TYPES = {str: "a string", list: "a list", dict: "an object"}
MARKS = ("<!-- results: written by scripts/results_pages.py -->\n", "<!-- end of results -->\n")
#: `{RUN|COLUMN|COLUMN=VALUE;...}`, of a page's text: a figure, or with `min:` or `max:` the extreme of several.
FIGURE = re.compile(r"\{(?:(min|max):)?(?:([\w-]+)/)?([\w-]+)\|([^|}]+)\|([^|}]*)\}")

Row = dict[str, Any]


class Invalid(Exception):
    """Results that give no page: the file, and the reason."""


@dataclass
class Document:
    """One file of bench/results/."""

    name: str
    data: dict[str, Any]

    def run(self, name: str) -> dict[str, Any]:
        for run in self.data["runs"]:
            if run["id"] == name:
                return dict(run)
        raise Invalid(f"{self.name}: no run {name!r}")

    def rows(self, name: str, where: list[Row] | None = None, columns: Iterable[str] = ()) -> list[Row]:
        """Returns the rows of a run that one of the filters in `where` permits; all of them without filters."""
        run = self.run(name)
        for column in [*columns, *(key for group in where or [] for key in group)]:
            if column not in run["columns"]:
                raise Invalid(f"{self.name}: run {name!r} has no column {column!r}")
        rows = [dict(zip(run["columns"], row)) for row in run["rows"]]
        return [row for row in rows if not where or any(_permits(group, row) for group in where)]


def _permits(group: Row, row: Row) -> bool:
    return all(row[column] in values for column, values in group.items())


def figure(value: object) -> str:
    """Returns a figure with all digits that were recorded, and no others."""
    if value is None:
        return "-"
    if isinstance(value, (int, Decimal)):
        return f"{value:,}"
    return str(value).replace("|", "\\|")


@contextlib.contextmanager
def _page_of(name: str) -> Iterator[None]:
    """Raises Invalid with the file's name if a value has another form than its page needs."""
    try:
        yield
    except KeyError as error:
        raise Invalid(f"{name}: missing {error}") from error
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise Invalid(f"{name}: a value has the wrong form ({error})") from error


def _check(name: str, data: Any, needed: Mapping[str, type], place: str = "") -> None:
    """Raises Invalid if an object lacks a key, or if a value has another type."""
    if not isinstance(data, dict):
        raise Invalid(f"{name}: {place}expected an object, got {data!r:.60}")
    for key, kind in needed.items():
        if key not in data:
            raise Invalid(f"{name}: missing {place + key!r}")
        if not isinstance(data[key], kind):
            raise Invalid(f"{name}: {place + key!r} is {data[key]!r:.60}, expected {JSON_TYPES[kind]}")


def _read(path: Path) -> Document:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{path.name}: {error}") from error
    document = Document(path.name, data)
    if not isinstance(data, dict) or data.get("format") != 1:
        raise Invalid(f"{path.name}: expected an object with format 1")
    if data.get("page") != path.stem:
        raise Invalid(f"{path.name}: page is {data.get('page')!r}, expected {path.stem!r}")
    if path.stem == "index":
        _check(path.name, data, NEEDED_OF_INDEX)
        return document
    _check(path.name, data, NEEDED)
    for run in data["runs"]:
        _check(path.name, run, NEEDED_OF_RUN, "runs: ")
    names = [run["id"] for run in data["runs"]]
    for run in data["runs"]:
        if names.count(run["id"]) > 1:
            raise Invalid(f"{path.name}: two runs {run['id']!r}")
        for row in run["rows"]:
            if not isinstance(row, list) or len(row) != len(run["columns"]):
                raise Invalid(f"{path.name}: run {run['id']!r} has {len(run['columns'])} columns, and a row {row}")
    return document


class Pages:
    """The pages of all files of one folder."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.json"))
        self.documents = {path.stem: _read(path) for path in paths}
        if "index" not in self.documents:
            raise Invalid(f"{folder}: no index.json")
        self.index = self.documents.pop("index")
        self.order = list(self.index.data["pages"])
        if sorted(map(str, self.order)) != sorted(self.documents):
            raise Invalid(f"index.json: pages are {self.order}, the files are {sorted(self.documents)}")

    # -- figures in texts --

    def text(self, document: Document, words: str) -> str:
        """Returns `words` with each `{RUN|COLUMN|FILTER}` replaced by its figure."""
        result = FIGURE.sub(lambda match: self._figure(document, match), words)
        if "{" in result:
            raise Invalid(f"{document.name}: not a figure: {words[words.index('{') :][:60]!r}")
        return result

    def _figure(self, document: Document, match: re.Match[str]) -> str:
        extreme, page, run, column, filters = match.groups()
        source = self.documents.get(page or "", document)
        pairs = [pair.split("=", 1) for pair in filters.split(";") if "=" in pair]
        rows = source.rows(run, None, [column, *(key for key, _ in pairs)])
        found = [row[column] for row in rows if all(str(row[key]) == value for key, value in pairs)]
        if extreme:
            numbers = [value for value in found if isinstance(value, (int, Decimal))]
            if not numbers:
                raise Invalid(f"{document.name}: no number for {match[0]}")
            return figure(min(numbers) if extreme == "min" else max(numbers))
        if len(found) != 1:
            raise Invalid(f"{document.name}: {len(found)} rows for {match[0]}, expected 1")
        return figure(found[0])

    # -- parts of a page --

    def table(self, document: Document, spec: Row, rows: list[Row]) -> str:
        columns = spec["columns"]
        if len(rows) > MOST_ROWS or len(columns) > MOST_COLUMNS:
            size = f"{len(rows)} rows and {len(columns)} columns"
            raise Invalid(
                f"{document.name}: a table of {spec['run']!r} has {size}, the maximum is {MOST_ROWS} and {MOST_COLUMNS}"
            )
        numeric = [
            all(row[column] is None or isinstance(row[column], (int, Decimal)) for row in rows) for column in columns
        ]
        lines = [columns, ["---:" if right else "---" for right in numeric]]
        lines += [[figure(row[column]) for column in columns] for row in rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def slower_rows(self, document: Document, spec: Row) -> list[Row]:
        """Returns the rows in which smddp's figure is above the bound: a constant, or another column."""
        column, bound = spec["column"], spec.get("above_column")
        rows = document.rows(spec["run"], spec.get("where"), [column, *spec["columns"], *([bound] if bound else [])])
        limits = [row[bound] if bound else spec["above"] for row in rows]
        return [
            row
            for row, limit in zip(rows, limits)
            if row[column] is not None and limit is not None and row[column] > limit
        ]

    def slower(self, document: Document) -> str:
        parts = []
        for spec in document.data["slower"]:
            rows = self.slower_rows(document, spec)
            if rows:
                parts.append(f"{wrapped(spec['text'])}\n{self.table(document, spec, rows)}")
        if not parts:
            parts.append("No row of the tables above is slower.\n")
        notes = [bullet(self.text(document, note)) for note in document.data["slower_notes"]]
        return "\n".join([*parts, "".join(notes)])

    def set_up(self, document: Document) -> str:
        shown = [spec["run"] for spec in [*document.data["tables"], *document.data["slower"]]]
        lines = []
        for name in dict.fromkeys(shown):
            run = document.run(name)
            versions = ", ".join(f"{library} {version}" for library, version in (run["versions"] or {}).items())
            commit = run["commit"] or "not recorded"
            recorded = run["recorded"]
            edited = f" (figures last edited in {recorded['commit']}, {recorded['date']})" if recorded else ""
            facts = [
                f"`{name}`: {run['title']}.",
                f"Machine: {run['machine'] or 'not recorded'}.",
                f"Versions: {versions or 'not recorded'}.",
                f"Commit: {commit}{'' if run['commit'] else edited}.",
                f"Command: `{run['command']}`." if run["command"] else "",
                run["method"] or "",
                run.get("note", ""),
            ]
            lines.append(bullet(" ".join(fact for fact in facts if fact)))
        return "".join(lines)

    def page(self, document: Document) -> str:
        data = document.data
        source = f"bench/results/{document.name}"
        parts = [f"# {data['title']}\n", f"<!-- written by scripts/results_pages.py from {source} -->\n"]
        parts.append(wrapped(f"**{self.text(document, data['answer'])}**"))
        chart = data.get("chart")
        if chart:
            parts += [f"![{chart['alt']}]({chart['file']})\n", wrapped(chart["text"])]
        for spec in data["tables"]:
            rows = document.rows(spec["run"], spec.get("where"), spec["columns"])
            parts += [f"## {spec['heading']}\n", wrapped(spec["text"]), self.table(document, spec, rows)]
        parts += ["## Where smddp is slower\n", self.slower(document)]
        parts += ["## Set-up\n", self.set_up(document)]
        repeat = data["repeat"]
        parts += ["## Repeat it\n", f"    {repeat['command']}\n", wrapped(repeat["text"])]
        parts += [
            "## Limits of these measurements\n",
            "".join(bullet(self.text(document, text)) for text in data["limits"]),
        ]
        parts.append("## Next\n")
        raw = f"- [All figures, and findings without a table](../../{source})\n"
        parts.append(f"{raw}- [Benchmark results](index.md)\n- [Measurement method](method.md)\n")
        return "\n".join(parts)

    def summary(self) -> str:
        rows = [[self.text(self.index, cell) for cell in row] for row in self.index.data["summary"]["rows"]]
        columns = self.index.data["summary"]["columns"]
        lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def index_page(self) -> str:
        data = self.index.data
        parts = [f"# {data['title']}\n", "<!-- written by scripts/results_pages.py from bench/results/index.json -->\n"]
        parts += [wrapped(data["text"]), self.summary(), wrapped(data["summary"]["text"])]
        parts.append("## Answers\n")
        slower = []
        for name in self.order:
            document = self.documents[name]
            title, question = document.data["title"], document.data["question"]
            parts.append(f"### [{title}]({name}.md)\n")
            parts.append(wrapped(f"{question} {self.text(document, document.data['answer'])}"))
            count = sum(len(self.slower_rows(document, spec)) for spec in document.data["slower"])
            slower.append(f"- [{title}]({name}.md#where-smddp-is-slower): {count} measured cases\n")
        parts += ["## Where smddp is slower\n", "".join(slower)]
        parts += ["## Repeat it\n", f"    {data['repeat']['command']}\n", wrapped(data["repeat"]["text"])]
        parts.append(
            "## Next\n\n- [Measurement method](method.md)\n- [Benchmark collectives](../guides/benchmark.md)\n"
        )
        return "\n".join(parts)

    # -- charts --

    def bars(self, document: Document) -> str | None:
        """Returns the bar chart of a page as SVG; None if it has none, or if another program draws it."""
        spec = document.data.get("chart")
        if not spec or "bars" not in spec:
            return None
        rows = document.rows(spec["bars"], spec.get("where"), [*spec["label"], *spec["series"]])
        return bar_chart([", ".join(str(row[key]) for key in spec["label"]) for row in rows], spec["series"], rows)


def bar_chart(labels: list[str], series: list[str], rows: list[Row]) -> str:
    """Draws a group of horizontal bars for each row, one bar for each series, on a scale that begins at 0."""
    bar, gap, begin, wide = 13, 8, 8 + 6 * max(len(label) for label in labels), 380
    colors = ("#3366aa", "#cc8844", "#888888")
    largest = max(row[name] for row in rows for name in series if row[name] is not None)
    elements, y = [], 30
    for number, name in enumerate(series):
        elements.append(svg.rect(begin + 180 * number, 8, 10, 10, colors[number]))
        elements.append(svg.label(begin + 180 * number + 14, 17, name))
    for text, row in zip(labels, rows):
        elements.append(svg.label(begin - 6, y + 6 + bar * len(series) / 2 - 3, text, "end"))
        for number, name in enumerate(series):
            if row[name] is not None:
                length = round(wide * float(row[name]) / float(largest), 1)
                elements.append(
                    svg.rect(begin, y, length, bar - 1, colors[number], title=f"{text}: {row[name]} {name}")
                )
                elements.append(svg.label(begin + length + 4, y + bar - 3, figure(row[name])))
            y += bar
        y += gap
    return svg.document(begin + wide + 70, y + 4, elements)


def wrapped(words: str) -> str:
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def bullet(words: str) -> str:
    return (
        textwrap.fill(
            words, 100, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        + "\n"
    )


def outputs(root: Path) -> dict[Path, str]:
    """Returns the text of every file that the results give."""
    pages = Pages(root / "bench" / "results")
    folder = root / "docs" / "results"
    index = folder / "index.md"
    texts = {index: ""}
    for name, document in pages.documents.items():
        with _page_of(document.name):
            texts[folder / f"{name}.md"] = pages.page(document)
            drawn = pages.bars(document)
            if drawn:
                texts[folder / document.data["chart"]["file"]] = drawn
    with _page_of(pages.index.name):
        texts[index] = pages.index_page()
        summary = pages.summary()
    readme = root / "README.md"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise Invalid(f"README.md: expected the lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    texts[readme] = f"{before}{begin}{summary}\n{end}{after}"
    return texts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/results/ from bench/results/.")
    parser.add_argument("--check", action="store_true", help="exit 1 if a page differs, and write nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository (default: this one)")
    options = parser.parse_args(arguments)
    try:
        texts = outputs(options.root)
    except (Invalid, OSError) as error:
        print(f"results_pages.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    pages = (options.root / "docs" / "results").glob("*.md")
    extra = [path for path in pages if path not in texts and path.name not in HANDWRITTEN]
    if options.check:
        for path in [*stale, *extra]:
            print(f"{path.relative_to(options.root)} differs from bench/results/: run `make docs`", file=sys.stderr)
        return 1 if stale or extra else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    for path in extra:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
