"""The functions that the architecture page names exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECTIONS = {"## SMP v2": "sagemaker", "## SMP v1": "modelparallel"}


def _defined(file: Path) -> set[str]:
    definitions = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, definitions)}


@pytest.mark.parametrize("title", SECTIONS)
def test_the_functions_behind_a_scripts_calls_exist(title):
    page = (ROOT / "docs/architecture.md").read_text()
    section = page[page.index(title) :].split("\n## ", 1)[0]
    rows = section[section.index("functions, in order") :].split("\n\n", 1)[0]
    # `folder/module.function` behind the first column, which is the call.
    named = [
        found for row in rows.splitlines() for found in re.findall(r"`([a-z0-9_/]+)\.(\w+)`", row.split("|", 2)[-1])
    ]
    assert len(named) >= 5
    package = ROOT / "python/smddp" / SECTIONS[title]
    missing = [
        f"{module}.{name}" for module, name in named if name != "py" and name not in _defined(package / f"{module}.py")
    ]
    assert not missing, missing


def test_the_functions_on_the_path_of_a_call_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page[page.index("## The path of one call") :].split("\n## ", 1)[0]
    named = re.findall(r"`([a-z]+) ([a-z_0-9/]+)::(\w+)`", section)
    assert len(named) >= 30
    missing = []
    for crate, module, name in named:
        path = ROOT / f"crates/smddp-{crate}/src/{module}"
        file = next((f for f in (path.with_suffix(".rs"), path / "mod.rs") if f.exists()), None)
        if file is None or not re.search(rf"\bfn {name}\b", file.read_text()):
            missing.append(f"{crate} {module}::{name}")
    assert not missing, missing
