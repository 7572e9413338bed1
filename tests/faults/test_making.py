"""A rank that dies during group creation is reported at once, and a silent store at the deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ranks.group import BACKEND

from faults import making

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="what other backends notice is theirs")

# Seconds: 1.5 on a busy machine, 0.5 until the last rank starts, and the time for an address of an earlier attempt.
PATIENCE = 1
SOON = 2.0 + PATIENCE


@pytest.fixture(scope="module")
def said() -> dict:
    settings = {**os.environ, "SMDDP_PEER_TIMEOUT": str(PATIENCE)}
    done = subprocess.run([sys.executable, making.__file__], capture_output=True, text=True, timeout=150, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_rank_that_dies_during_group_creation_is_reported_within_seconds(said):
    for what, victim, errors in said["dead"]:
        assert len(errors) == making.SIZE - 1, (what, errors)
        for rank, seconds, text in errors:
            assert text.startswith("PeerLostError") and f"rank {victim} (host " in text, (what, rank, text)
            assert "pid " in text and seconds < SOON, (what, rank, seconds, text)


def test_silent_store_is_reported_at_the_deadline(said):
    seconds, text = said["silent"]
    assert text.startswith("CollectiveTimeoutError: init_process_group on group"), text
    assert "the store (TCPStore at 127.0.0.1:" in text and "does not answer" in text, text
    # Once more it is asked, for a second.
    assert making.SILENT_LIMIT <= seconds < making.SILENT_LIMIT + 3, seconds
