"""A rank that dies while a group is made is named by all others at once, not at the deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from backend.ranks import BACKEND

from faults import making

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="what other backends notice is theirs")

# A busy machine's second and a half, half a second in which the last one is not there yet, and what is given to an
# address that may be of an earlier attempt.
PATIENCE = 1
SOON = 2.0 + PATIENCE


def test_who_dies_while_a_group_is_made_is_named_by_all_within_seconds():
    settings = {**os.environ, "SMDDP_PEER_TIMEOUT": str(PATIENCE)}
    done = subprocess.run([sys.executable, making.__file__], capture_output=True, text=True, timeout=150, env=settings)
    assert done.returncode == 0, done.stderr
    for what, victim, said in json.loads(done.stdout):
        assert len(said) == making.SIZE - 1, (what, said)
        for rank, seconds, text in said:
            assert text.startswith("PeerLostError") and f"rank {victim} (host " in text, (what, rank, text)
            assert "pid " in text and seconds < SOON, (what, rank, seconds, text)
