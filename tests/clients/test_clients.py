"""torch's own clients on our backend: each trains to the losses of one process.

SMDDP_TEST_BACKEND names the backend (default: smddp). The cases are the functions `case_*` of the
modules in `cases/`, run by one pool of four ranks.
"""

from __future__ import annotations

import ast
import os

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))

# torch.compile takes most of a minute for the module, whatever the backend.
SLOW = {"compiled"}

# What a backend we only compare with cannot do, and why.
NOT_UNDER = {
    ("gloo", "historic_names", "*"): "the smdistributed modules are ours",
    ("gloo", "ddp", "case_debug_detail"): "torch 2.15 itself crashes in DDP's logger with gloo and DETAIL",
}


def cases() -> list:
    """(module, function) of every case, slow ones marked; read from the source, so that collecting imports no torch."""
    found = []
    for name in sorted(os.listdir(os.path.join(HERE, "cases"))):
        if name.endswith(".py") and name != "__init__.py":
            with open(os.path.join(HERE, "cases", name)) as source:
                tree = ast.parse(source.read())
            names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
            marks = [pytest.mark.slow] if name[:-3] in SLOW else []
            found += [pytest.param(name[:-3], n, marks=marks) for n in names if n.startswith("case_")]
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("module", "function"), cases(), ids=lambda part: part.removeprefix("case_"))
def test_client(ranks, module, function):
    for name in (function, "*"):
        if reason := NOT_UNDER.get((ranks.backend, module, name)):
            pytest.skip(reason)
    ranks.run(f"cases.{module}", function, seconds=90.0)
