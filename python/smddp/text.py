"""Text for messages: suggestions for misspelt names, and text of other processes made safe to print."""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Iterable

# Ratio of difflib below which two names have little in common.
_CUTOFF = 0.6


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
    found = nearest(word, words)
    return f"; did you mean {found!r}?" if found else ""


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


def first_line(error: BaseException) -> str:
    """Returns class and text of an error, without the stack of C++ code that torch appends."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
