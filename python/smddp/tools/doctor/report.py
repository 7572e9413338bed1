"""Text output of the doctor."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from smddp.text import named_ranks, printable
from smddp.tools.doctor.finding import FAIL, OK, WARN, Finding

_NAME = 24
_HEAD = 8 + _NAME
_LEAST = 40
# Maximum number of lines of one check.
_FEW = 4
_MARK = {FAIL: "FAIL", WARN: "warn"}
# SGR codes of ANSI terminals.
_COLOUR = {"FAIL": 31, "warn": 33}


def verdict(findings: Sequence[Finding]) -> str:
    """ "healthy", "warnings" or "failing"."""
    statuses = {finding.status for finding in findings}
    return "failing" if FAIL in statuses else "warnings" if WARN in statuses else "healthy"


def lines(head: str, findings: Sequence[Finding], present: int, columns: int) -> list[str]:
    """Returns the text, wrapped to `columns`. present: number of present ranks."""
    text = [head, ""]
    for finding in _few(findings):
        about = f"{named_ranks(finding.ranks)}: " if finding.ranks and len(finding.ranks) < present else ""
        text += _row(f"{_MARK.get(finding.status, 'ok'):<6}{finding.name}", about + finding.found, columns)
        text += _row("", f"means: {finding.means}", columns) if finding.means else []
        text += _row("", f"do: {finding.do}", columns) if finding.do else []
    bad = [finding.name for finding in findings if finding.status == FAIL]
    warned = [finding.name for finding in findings if finding.status == WARN]
    text += ["", f"{verdict(findings)}: {len(findings) - len(bad) - len(warned)} ok"]
    for what, names in (("warn", warned), ("FAIL", bad)):
        text[-1] += f"; {what} {', '.join(dict.fromkeys(names))}" if names else ""
    return text


def coloured(lines: Sequence[str]) -> list[str]:
    """Returns the lines for a terminal, with the marks of failed checks in red and of warnings in yellow."""
    return [
        f"{line[:2]}\x1b[{_COLOUR[line[2:6]]}m{line[2:6]}\x1b[0m{line[6:]}" if line[2:6] in _COLOUR else line
        for line in lines
    ]


def _few(findings: Sequence[Finding]) -> list[Finding]:
    """Merges surplus passing findings of one check; `--json` lists them all."""
    shown: list[Finding] = []
    for finding in findings:
        like = [it for it in findings if (it.name, it.status) == (finding.name, OK)]
        if finding.status != OK or len(like) <= _FEW or finding in like[: _FEW - 1]:
            shown.append(finding)
        elif finding == like[-1]:
            ranks = tuple(sorted(rank for it in like[_FEW - 1 :] for rank in it.ranks))
            shown.append(Finding(OK, "ok, with different values (--json)", name=finding.name, ranks=ranks))
    return shown


def _row(name: str, text: str, columns: int) -> list[str]:
    # Facts of other hosts are untrusted text.
    wrapped = textwrap.wrap(
        printable(" ".join(text.split())), max(columns - _HEAD, _LEAST), break_long_words=False, break_on_hyphens=False
    )
    return [f"  {name if at == 0 else '':<{_HEAD - 2}}{line}".rstrip() for at, line in enumerate(wrapped or [""])]
