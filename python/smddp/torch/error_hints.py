"""Which line of the doctor shows the cause of an error: by words that the core's texts keep."""

from __future__ import annotations

import re

#: Words of a text, in the core's sources as they stand here, and the doctor's check. The first that fits counts.
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
    """ "; `smddp doctor` shows it: open files" for an error's text that a check would have explained, else ""."""
    check = SETTING if _SETTING.search(text) else next((check for words, check in HINTS if words in text), None)
    return f"; `smddp doctor` shows it: {check}" if check else ""
