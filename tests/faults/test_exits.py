"""A rank ends with its own status in every state, and its peer gets the right error."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks.group import BACKEND

from faults.exits import ENDS, SOFT, STATES, WIRES

pytestmark = pytest.mark.skipif(BACKEND != "smddp", reason="what smddp promises")

CRASHES = ("Fatal Python error", "panicked", "terminate called", "SystemError")

Cell = tuple[str, str, str]


def program(cells: list[Cell], folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, Path(__file__).with_name("exits.py"), json.dumps(cells), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wrong(found: dict[str, Any]) -> str | None:
    """Describes a violated guarantee of a cell; None if all hold."""
    state, end, wire = found["cell"]
    (status, others), (mine, theirs) = found["status"], found["said"]
    error_of_peer = theirs.rpartition("error: ")[2].split()
    right = [
        status == ENDS[end][1],
        others == 0,
        bool(error_of_peer),
        not any(crash in mine + theirs for crash in CRASHES),
    ]
    if state in ("no group", "destroyed"):
        right.append(error_of_peer == ["none"])
    elif error_of_peer:
        allowed = {"PeerLostError"} | ({"MismatchError"} if state == "isend" and end in SOFT else set())
        right.append(error_of_peer[0] in allowed)
        if error_of_peer[0] == "PeerLostError":
            right.append(error_of_peer[1:] == ["[0]"])
    if state == "exit hook" and end in SOFT:
        right.append("the hook's sum is 2.0" in mine)
    if all(right):
        return None
    facts = f"status {status} and {others}, peer {error_of_peer}, checks {right}"
    return f"{state}, {end}, {wire}: {facts}\n{mine[-1500:]}\n{theirs[-800:]}"


def covering() -> list[Cell]:
    """Every state over each wire, every end over each wire, and each state with a soft and a hard end."""
    ends, cells = list(ENDS), []
    for number, state in enumerate(STATES):
        for number_of_wire, wire in enumerate(WIRES):
            cells.append((state, ends[(2 * number + 3 * number_of_wire + number // 4) % len(ends)], wire))
    return cells


def test_the_covering_cells_have_every_state_and_every_end_over_each_wire():
    cells = covering()
    assert {(state, wire) for state, _, wire in cells} == set(itertools.product(STATES, WIRES))
    assert {end for _, end, _ in cells} == set(ENDS)


def test_a_rank_ends_with_its_own_status_and_its_peer_gets_an_error(tmp_path):
    found = [each for each in map(wrong, program(covering(), tmp_path)) if each]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_a_rank_ends_with_its_own_status_in_every_way_over_every_wire(tmp_path, state):
    cells = list(itertools.product([state], ENDS, WIRES))
    found = [each for each in map(wrong, program(cells, tmp_path)) if each]
    assert not found, f"{len(found)} of {len(cells)}:\n" + "\n".join(found)


@pytest.mark.slow
def test_a_rank_ends_a_hundred_times_while_a_callback_runs(tmp_path):
    cells: list[Cell] = [(state, "return", "shm") for state in ("callback", "future") for _ in range(50)]
    found = [each for each in map(wrong, program(cells, tmp_path)) if each]
    assert not found, f"{len(found)} of {len(cells)}:\n" + "\n".join(found[:3])
