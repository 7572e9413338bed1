"""torch's own clients on our backend: each trains to the losses of one process.

SMDDP_TEST_BACKEND names the backend (default: smddp). The cases are the functions `case_*` of the
modules in `cases/`, run by one pool of four ranks.
"""

from __future__ import annotations

import os

import pytest
from ranks.cases import case_names

HERE = os.path.dirname(os.path.abspath(__file__))

# torch.compile takes most of a minute for the module, whatever the backend.
SLOW = {"compiled"}

# Cases that reference backends do not support, with the reason.
NOT_UNDER = {
    ("gloo", "historic_names", "*"): "the smdistributed modules are ours",
    ("gloo", "ddp", "case_debug_detail"): "torch 2.15 itself crashes in DDP's logger with gloo and DETAIL",
}


def cases() -> list:
    """(module, function) of every case, slow ones marked."""
    found = case_names(os.path.join(HERE, "cases"))
    return [pytest.param(*case, marks=[pytest.mark.slow] if case[0] in SLOW else []) for case in found]


@pytest.mark.parametrize(("module", "function"), cases(), ids=lambda part: part.removeprefix("case_"))
def test_client(ranks, module, function):
    for name in (function, "*"):
        if reason := NOT_UNDER.get((ranks.backend, module, name)):
            pytest.skip(reason)
    ranks.run(f"cases.{module}", function, seconds=90.0)
