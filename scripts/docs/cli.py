"""docs/reference/cli/*.md: commands, arguments and options of all programs.

`smddp` and `smddprun`: the argparse parsers of `smddp.tools.pages`, as for completion and manual pages. `smddp-bench`:
its own manual pages (`smddp-bench man`), which come from its clap parsers.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import writer

BENCH_SOURCE = "crates/smddp-bench/src/pages.rs"
_FONT = re.compile(r"\\f[BIRP]")
_DEFAULT = re.compile(r"\s*\[default: ([^\]]*)\]")
_COLUMNS = ("option", "default", "description")

EXAMPLES = {
    "smddp": ("$ smddp --version", "smddp 0.1.0", "..."),
    "smddprun": ("$ smddprun --nproc 2 env | grep ^RANK", "RANK=0", "RANK=1"),
    "smddp-bench": ("$ smddp-bench all_reduce --nproc 2 -b 1K -e 64M -f 8", "..."),
}


# -- argparse --


def _argument(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest).upper() if not action.choices else "|".join(map(str, action.choices))
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return parser.usage % {"prog": parser.prog}
    arguments = [action for action in parser._actions if not action.option_strings]
    if any(isinstance(action, argparse._SubParsersAction) for action in arguments):
        return f"{parser.prog} [options] COMMAND ..."
    return " ".join([parser.prog, "[options]", *map(_argument, arguments)])


def _option(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    if action.choices:
        value = f" {'|'.join(map(str, action.choices))}"
    value = f" [{value.strip()}]" if action.nargs == "?" else value
    return f"`{', '.join(action.option_strings)}{value}`"


def _default(action: argparse.Action) -> str:
    shown = action.nargs != 0 and action.default not in (None, [], argparse.SUPPRESS)
    return writer.code(action.default) if shown else "-"


def _section(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    from smddp.tools import pages

    title = parser.prog
    arguments = [
        action
        for action in parser._actions
        if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
    ]
    parts = [f"## {title}\n\n", writer.paragraph(writer.sentence(parser.description or summary))]
    parts.append(writer.console(f"$ {_usage(parser)}"))
    if any(action.help for action in arguments):
        rows = [(writer.code(_argument(action)), pages.help_text(parser, action)) for action in arguments]
        parts.append(writer.table(("argument", "description"), rows))
    rows_of_options = [
        (_option(action), _default(action), pages.help_text(parser, action) or "-") for action in pages.options(parser)
    ]
    parts.append(writer.table(_COLUMNS, rows_of_options))
    parts.append(writer.paragraph(writer.sentence(parser.epilog)) if parser.epilog else "")
    return "".join(parts)


def smddp_page() -> str:
    from smddp.tools import cli, pages

    smddp = cli.parser()
    summaries, parsers = pages.summaries(smddp), pages.parsers(smddp)
    del parsers["smddprun"]
    names = [name for name in parsers if name != "smddp"]
    commands = [(f"[{parsers[name].prog}](#{name})", summaries[name]) for name in names]
    commands.append(("[smddp bench](smddp-bench.md)", "the same as smddp-bench"))
    parts = [
        writer.paragraph("`smddp` checks machines, shows live jobs and starts ranks."),
        writer.console(*EXAMPLES["smddp"]),
        writer.table(("command", "description"), commands),
        *(_section(name, parsers[name], summaries[name]) for name in parsers),
        writer.links(
            ("Check machines and links", "../../guides/check-a-machine.md"),
            ("Debug a hang", "../../guides/debug-a-hang.md"),
            ("Record, trace and replay a job", "../../guides/traces-and-replay.md"),
        ),
    ]
    return writer.page("Command line: smddp", "python/smddp/tools/cli.py", *parts)


def smddprun_page() -> str:
    from smddp.tools import pages

    parser = pages.smddprun()
    parts = [
        writer.paragraph("`smddprun` runs a command as one rank of a launcher, or starts the ranks itself."),
        writer.console(*EXAMPLES["smddprun"]),
        _section("smddprun", parser, ""),
        writer.links(
            ("Launch with mpirun, Slurm, torchx or smddprun", "../../guides/launchers.md"),
            ("RANK, MASTER_ADDR and other launcher variables", "../launcher-variables.md"),
        ),
    ]
    return writer.page("Command line: smddprun", "python/smddp/tools/pages.py", *parts)


# -- manual pages of smddp-bench --


@dataclass
class Manual:
    """Content of a manual page of clap_mangen."""

    name: str
    summary: str
    arguments: list[tuple[str, str]] = field(default_factory=list)
    options: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _plain(line: str) -> str:
    return _FONT.sub("", line).replace("\\-", "-").replace("\\*(Aq", "'").replace("\\(aq", "'").replace("\\e", "\\")


def _items(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Returns the heading and the text of each item, without lists of possible values."""
    heading, skip = "", False
    text: list[str] = []
    for line in lines:
        if line == ".TP":
            if heading:
                yield heading, " ".join(text)
            heading, text, skip = "", [], False
        elif not heading:
            heading = _plain(line)
        elif line.startswith("."):
            skip = True  # the list of possible values follows
        elif not skip:
            text.append(_plain(line))
    if heading:
        yield heading, " ".join(text)


def _manual(text: str) -> Manual:
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(".SH "):
            sections[line[4:]] = lines = []
        elif sections:
            lines.append(line)
    name, _, summary = _plain(sections["NAME"][0]).partition(" - ")
    found = Manual(name, summary)
    for heading, words in _items(sections["OPTIONS"]):
        default = _DEFAULT.search(heading)
        heading = _DEFAULT.sub("", heading).replace("<", "").replace(">", "")
        if heading.startswith("-"):
            found.options.append((heading, default[1] if default else "", words))
        else:
            found.arguments.append((heading, words))
    notes = "\n".join(map(_plain, sections.get("EXTRA", [])))
    found.notes = [note for note in notes.split("\n\n") if note.strip()]
    return found


def _bench_section(manual: Manual) -> str:
    title = manual.name.replace("smddp-bench-", "smddp-bench ")
    parts = [f"## {title}\n\n", writer.paragraph(writer.sentence(manual.summary))]
    words = " ".join(heading for heading, _ in manual.arguments)
    parts.append(writer.console(f"$ {title} [options] {words}".rstrip()))
    if manual.arguments:
        parts.append(
            writer.table(("argument", "description"), [(f"`{name}`", text or "-") for name, text in manual.arguments])
        )
    rows = [(f"`{name}`", writer.code(default), text) for name, default, text in manual.options]
    parts.append(writer.table(_COLUMNS, rows))
    for note in manual.notes:
        if note.startswith(("bash:", "zsh:")):
            parts.append("```text\n" + note + "\n```\n\n")
        else:
            parts.append(writer.paragraph(" ".join(_escaped(note).split())))
    return "".join(parts)


def _escaped(note: str) -> str:
    return re.sub(r"\*", r"\\*", note)


def bench_page() -> str:
    from smddp.tools import cli

    with tempfile.TemporaryDirectory() as folder:
        if cli.bench(["man", "--to", folder]) != 0:
            raise SystemExit("scripts/docs/cli.py: `smddp-bench man` failed")
        files = sorted(Path(folder).glob("*.1"), key=lambda path: path.stem)
        manuals = [_manual(path.read_text(encoding="utf-8")) for path in files]
    parts = [
        writer.paragraph("`smddp-bench` measures and checks collectives, and simulates and explains their plans."),
        writer.console(*EXAMPLES["smddp-bench"]),
        *map(_bench_section, manuals),
        writer.links(
            ("Benchmark collectives", "../../guides/benchmark.md"),
            ("Tune performance", "../../guides/tune.md"),
            ("Predict scaling", "../../guides/simulate.md"),
        ),
    ]
    return writer.page("Command line: smddp-bench", BENCH_SOURCE, *parts)
