"""Transports between hosts: TCP sockets or libfabric; on one machine, processes counted as several nodes use these,
shared memory, or simulated EFA."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

#: Settings that select each transport.
WIRES = {
    "tcp": {"SMDDP_TRANSPORT": "tcp"},
    "fabric": {"SMDDP_TRANSPORT": "fabric:tcp"},
}

# The file of the libfabric that simulates EFA between processes (crates/fake-libfabric).
_EFA = os.environ.get("SMDDP_TEST_EFA_LIBRARY", "")

#: Settings for processes of one machine. Entries missing in WIRES cannot connect hosts.
WAYS = {
    "shm": {},
    **WIRES,
    "efa": {
        "SMDDP_TRANSPORT": "efa",
        "SMDDP_LIBFABRIC": _EFA,
        "FAKE_EFA_DEVICES": "2",
    },
}


@functools.cache
def why_not(wire: str) -> str | None:
    """Returns why tests cannot use this wire here, or None."""
    if wire == "efa" and not os.path.exists(_EFA):
        return (
            f"SMDDP_TEST_EFA_LIBRARY ({_EFA!r}) is not the file of the simulated EFA; `make test-python` sets it, or: "
            "export SMDDP_TEST_EFA_LIBRARY=$(cargo run -q -p fake-libfabric)"
        )
    if wire != "fabric":
        return None
    library = os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1"
    # Separate process: loading the library starts providers for the process's lifetime.
    load = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library]
    done = subprocess.run(load, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    return f"no libfabric (scripts/libfabric.sh installs it where it can): {done.stderr.strip().splitlines()[-1]}"


def settings(wire: str, backend: str = "smddp") -> dict[str, str]:
    """The environment of ranks that use this wire. Skips the test if the wire is unavailable."""
    if backend != "smddp" and wire != "tcp":
        pytest.skip(f"{backend} has no such choice")
    if reason := why_not(wire):
        pytest.skip(reason)
    return WAYS[wire]


def usable(ways: list[str]) -> list[str]:
    """Returns the available wires; prints the unavailable ones with the reason."""
    reasons = {way: why_not(way) for way in ways}
    for way, reason in reasons.items():
        if reason:
            print(f"{way} is left out: {reason}")
    return [way for way in ways if not reasons[way]]
