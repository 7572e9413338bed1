"""What the hosts are joined by: our own sockets, or libfabric over the same network."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest

#: The settings that choose each.
WIRES = {
    "tcp": {"SMDDP_REQUIRE": "tcp"},
    "fabric": {"SMDDP_TRANSPORT": "fabric", "SMDDP_FABRIC_PROVIDER": "tcp", "SMDDP_REQUIRE": "fabric"},
}


@functools.cache
def why_not(wire: str) -> str | None:
    """Why tests cannot use this wire here; None if they can."""
    if wire != "fabric":
        return None
    library = os.environ.get("SMDDP_LIBFABRIC") or "libfabric.so.1"
    # In a process of its own: loading it starts providers, which stay.
    load = [sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library]
    done = subprocess.run(load, capture_output=True, text=True, timeout=60)
    if done.returncode == 0:
        return None
    return f"no libfabric (scripts/libfabric.sh installs it where it can): {done.stderr.strip().splitlines()[-1]}"


def settings(wire: str, backend: str = "smddp") -> dict[str, str]:
    """The environment of ranks that use this wire. Skips the test where there is no such wire here."""
    if backend != "smddp" and wire != "tcp":
        pytest.skip(f"{backend} has no such choice")
    if reason := why_not(wire):
        pytest.skip(reason)
    return WIRES[wire]
