"""Shell completion scripts and manual pages of `smddp` and `smddprun`, generated from their parsers."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from smddp import command_line, files
from smddp.estimator import shell
from smddp.launch import programs

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "DIR", "DUMP", "SCRIPT", "CHANNEL=PATH")


def smddprun() -> argparse.ArgumentParser:
    """Returns a description of smddprun's command line, which it parses itself to start fast."""
    parser = command_line.Parser(
        prog="smddprun",
        usage="%(prog)s [options] COMMAND ...",
        description="Run a command as the rank of a launcher, or as several ranks of this machine.",
    )
    most = programs.MAX_RANKS
    parser.add_argument("-n", "-np", "--nproc", metavar="N", help=f"start N ranks on this machine (1 to {most})")
    parser.add_argument("-x", metavar="NAME[=VALUE]", help="set an environment variable of the ranks")
    parser.add_argument("--tag-output", action="store_true", help="begin each line of a rank's output with [RANK]")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    return parser


def parsers(smddp: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers by the name of their page: smddp, smddp-info, ..., smddprun."""
    found = {"smddp": smddp}
    for name, parser in _commands(smddp).items():
        found[f"smddp-{name}"] = shell.parser() if name == "launch" else parser
    # smddp-bench has its own completion and pages.
    del found["smddp-bench"]
    return {**found, "smddprun": smddprun()}


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), {})


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Returns the options that `--help` shows."""
    return (action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS)


def help_text(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Returns the description of an option or argument."""
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def completion(smddp: argparse.ArgumentParser, of: str) -> str:
    """Returns the script for a shell, for both programs."""
    if of == "fish":
        return "".join(f"{line}\n" for line in _fish(smddp))
    text = "".join(f"{line}\n" for line in _bash(smddp))
    return text if of == "bash" else f"#compdef smddp smddprun\nautoload -U +X bashcompinit && bashcompinit\n{text}"


def _words(parser: argparse.ArgumentParser) -> str:
    choices = [str(word) for action in parser._actions if not action.option_strings for word in action.choices or ()]
    return " ".join([*choices, *(word for action in options(parser) for word in action.option_strings)])


def _bash(smddp: argparse.ArgumentParser) -> Iterator[str]:
    yield "_smddp() {"
    yield '    local words="" current="${COMP_WORDS[COMP_CWORD]}"'
    yield '    case "${COMP_WORDS[0]##*/}:${COMP_WORDS[1]}" in'
    for name, parser in parsers(smddp).items():
        if name.startswith("smddp-"):
            yield f"        smddp:{name.removeprefix('smddp-')}) words={shlex.quote(_words(parser))} ;;"
    yield f"        smddprun:*) words={shlex.quote(_words(smddprun()))} ;;"
    yield "    esac"
    yield '    if [ "$COMP_CWORD" -eq 1 ] && [ "${COMP_WORDS[0]##*/}" = smddp ]; then'
    yield f"        words={shlex.quote(_words(smddp))}"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield "complete -o default -F _smddp smddp smddprun"


def _fish(smddp: argparse.ArgumentParser) -> Iterator[str]:
    helps = {
        choice.dest: choice.help or ""
        for action in smddp._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action._choices_actions
    }
    for name in _commands(smddp):
        yield f"complete -c smddp -n __fish_use_subcommand -f -a {name} -d {shlex.quote(helps.get(name, ''))}"
    for name, parser in parsers(smddp).items():
        command = name.partition("-")[2]
        condition = f" -n '__fish_seen_subcommand_from {command}'" if command else ""
        for action in options(parser):
            words = " ".join(
                f"-l {word[2:]}" if word.startswith("--") else f"-s {word[1:]}" if len(word) == 2 else f"-o {word[1:]}"
                for word in action.option_strings
            )
            value = "" if action.nargs == 0 else " -r" if action.metavar in _FILES else " -x"
            text = shlex.quote(help_text(parser, action))
            yield f"complete -c {name.partition('-')[0]}{condition} {words}{value} -d {text}"


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in escaped.splitlines())


def page(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    """Returns a manual page in roff."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    text = [f'.TH {_roff(name.upper())} 1 "" smddp', ".SH NAME", f"{_roff(name)} \\- {_roff(summary)}"]
    text += [".SH SYNOPSIS", _roff(usage), ".SH DESCRIPTION", _roff(parser.description or summary)]
    for title, actions in (
        ("COMMANDS AND ARGUMENTS", [action for action in parser._actions if not action.option_strings]),
        ("OPTIONS", list(options(parser))),
    ):
        text += [f".SH {title}"] if actions else []
        for action in actions:
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    text += [".TP", f"\\fB{_roff(choice.dest)}\\fR", _roff(choice.help or "")]
                continue
            value = "" if action.nargs == 0 else f" \\fI{_roff(str(action.metavar or action.dest))}\\fR"
            names = ", ".join(f"\\fB{_roff(word)}\\fR" for word in action.option_strings)
            text += [".TP", (names + value).strip(), _roff(help_text(parser, action)) or "\\&"]
    text += [".SH NOTES", _roff(parser.epilog)] if parser.epilog else []
    return "\n".join([*text, ""])


def summaries(smddp: argparse.ArgumentParser) -> dict[str, str]:
    """Returns the first line of each page by its name."""
    found = {
        f"smddp-{choice.dest}": choice.help for a in smddp._actions for choice in getattr(a, "_choices_actions", ())
    }
    return {name: found.get(name) or parser.description or "" for name, parser in parsers(smddp).items()}


def manual(smddp: argparse.ArgumentParser, name: str, folder: str | None) -> int:
    """Prints a page, or writes all pages to a folder. Returns the exit status."""
    texts = summaries(smddp)
    pages = {key: page(key, parser, texts[key]) for key, parser in parsers(smddp).items()}
    if folder is None:
        print(pages[name], end="")
        return 0
    for key, text in pages.items():
        try:
            files.write_text(Path(folder, f"{key}.1"), text)
        except OSError as error:
            print(f"smddp man: {error.filename}: {error.strerror}", file=sys.stderr)
            return 1
    return 0
