"""Helpers that several packages need are defined in one module each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "python" / "smddp"
#: Source text of a helper, as a regular expression, and the modules that contain it.
HELPERS = {
    "suggestions": (r"get_close_matches|did you mean", {"text.py"}),
    "byte sizes as text": (r"[\"'][KMG]iB[\"'],", {"text.py"}),
    "lists of ranks": (r"else \"ranks\"|rank\{'s' \* .*join\(map\(str", {"text.py"}),
    "divisors": (r"for (\w+) in range\(1, (\w+) \+ 1\) if \2 % \1 == 0", {"text.py"}),
    "SVG": (r"</svg>|<rect|<text", {"observability/svg.py"}),
    "packed files of a job": (r"tarfile\.open\(fileobj=", {"estimator/archives.py"}),
    "death of the parent": (r"\.prctl\(", {"launch/local.py"}),
    "stores of a process": (r"def delete_key\(.*\n.*\.pop\(", {"observability/values.py"}),
    "replaced constructors of modules": (r"nn\.Module\.__init__ = ", {"modelparallel/new_modules.py"}),
}


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_is_defined_in_one_module(helper):
    pattern, modules = HELPERS[helper]
    users = {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if re.search(pattern, file.read_text())}
    assert users == modules
