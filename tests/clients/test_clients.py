"""torch's own clients on our backend: each trains to the losses of one process.

SMDDP_TEST_BACKEND names the backend (default: smddp). The cases are the functions `case_*` of the
modules in `cases/`, run by one pool of four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks.cases import each_case

CASES = Path(__file__).with_name("cases")

# torch.compile takes most of a minute for the module, whatever the backend.
SLOW = {"compiled"}

# Cases that reference backends do not support, with the reason.
NOT_UNDER = {
    ("gloo", "historic_names", "*"): "the smdistributed modules are ours",
    ("gloo", "ddp", "case_debug_detail"): "torch 2.15 itself crashes in DDP's logger with gloo and DETAIL",
}


@each_case(CASES, SLOW)
def test_client(ranks, module, function):
    for name in (function, "*"):
        if reason := NOT_UNDER.get((ranks.backend, module, name)):
            pytest.skip(reason)
    ranks.run(f"cases.{module}", function, seconds=90.0)
