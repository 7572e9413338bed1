"""Hints from error texts to the `smddp doctor` check that explains the error."""

from __future__ import annotations

import re

#: Fixed parts of the core's error texts and the name of the doctor's check. The first match applies.
HINTS: tuple[tuple[str, str], ...] = (
    ("no file descriptor left", "open files"),
    ("Too many open files", "open files"),
    ("does not fit into the limits of this process", "address space"),
    ("the system call ", "system calls"),
    ("matches no network interface", "interfaces"),
    ("leaves no network interface", "interfaces"),
    ("no network interface of this host", "interfaces"),
    ("has only the loopback address", "loopback"),
    ("the version of smddp differs", "versions"),
    ("their network namespaces differ", "nodes"),
    ("they run as different users", "nodes"),
    ("cannot share memory with this process", "nodes"),
    ("did not join group", "ranks"),
)
_SETTING = re.compile(r"\bSMDDP_[A-Z_]+ differs: ")
SETTING = "settings between ranks"


def hint(text: str) -> str:
    """Returns "; `smddp doctor` shows it: open files" for an error text that a check explains, else ""."""
    check = SETTING if _SETTING.search(text) else next((check for words, check in HINTS if words in text), None)
    return f"; `smddp doctor` shows it: {check}" if check else ""
