"""Text of messages and arguments: suggestions for misspelt names, sizes, and escapes for text of other processes."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterable, Mapping

# Ratio of difflib below which two names have little in common.
_CUTOFF = 0.6
# Characters of a list of ranks.
_MOST_OF_RANKS = 300


def nearest(word: object, words: Iterable[str]) -> str | None:
    """Returns the known name that `word` is most likely a misspelling of, or None if no known name is similar.

    A prefix that all names share, such as SMDDP_, says nothing and is not compared.
    """
    known, given = list(words), str(word)
    prefix = os.path.commonprefix(known) if len(known) > 1 else ""  # noqa: RUF071 (characters, no folders)
    if not given.startswith(prefix):
        prefix = ""
    ends = {name.removeprefix(prefix): name for name in known}
    found = difflib.get_close_matches(given.removeprefix(prefix), ends, 1, _CUTOFF)
    return ends[found[0]] if found else None


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Returns "; did you mean 'NAME'?" for a misspelt `word`, or "" if no known name is similar."""
    return suggestion(nearest(word, words))


def suggestion(name: str | None) -> str:
    """Returns "; did you mean 'NAME'?", or "" for None."""
    return f"; did you mean {name!r}?" if name else ""


def divisors(number: int) -> str:
    """Returns the divisors of a number as text: "1, 2, 3, 6"."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def format_size(number: float) -> str:
    """Formats bytes with a binary unit and at most one decimal: "64 MiB", "1.2 GiB"."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop()
    return f"{number:.1f}".removesuffix(".0") + f" {units[-1]}"


def parse_size(given: str, units: Mapping[str, int], examples: str) -> int:
    """Returns the bytes of text such as "1.5 MiB".

    units: bytes of each permitted unit, in capitals; "" for text without a unit. Raises ValueError, with `examples`.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", given, re.IGNORECASE)
    if not found or found[2].upper() not in units:
        raise ValueError(f"invalid size {given!r}: expected {examples}")
    return int(float(found[1]) * units[found[2].upper()])


def printable(text: object) -> str:
    """Returns `text` with control, format and unpaired surrogate characters as escapes such as \\x1b.

    Text of another process can otherwise move the cursor, hide lines or make invalid XML.
    """
    given = str(text)
    if given.isprintable():
        return given
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in given
    )


def this_rank(rank: int) -> str:
    """Returns rank `rank`, this process, as errors name it: "rank 1 (host a, pid 7)"."""
    return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"


def named_ranks(ranks: Iterable[int]) -> str:
    """Returns "rank 5" or "ranks 0, 1, 7-9" as the core names ranks; a long list ends in "and 12 more"."""
    left = sorted(ranks)
    title, text = "rank" if len(left) == 1 else "ranks", ""
    while left:
        run = next((at for at, rank in enumerate(left) if rank != left[0] + at), len(left))
        part = f"{left[0]}-{left[run - 1]}" if run > 2 else ", ".join(map(str, left[:run]))
        if len(text) > _MOST_OF_RANKS:
            part, run = f"and {len(left)} more", len(left)
        text += f", {part}" if text else f" {part}"
        del left[:run]
    return title + text


def first_line(error: BaseException) -> str:
    """Returns class and text of an error, without the stack of C++ code that torch appends."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
