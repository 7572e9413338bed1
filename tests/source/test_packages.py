"""Imports among the packages of smddp: no circles, one direction, and no torch where it is not needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "python"
FOUNDATION = {"command_line", "files", "text", "validation", "formats", "_native", "_constants", "_historic"}
BELOW_TORCH = {"observability", "exit_hooks", "launch"}
# Packages, and the packages that they may import besides the files of FOUNDATION.
ALLOWED = {
    "observability": set(),
    "launch": set(),
    "smp": set(),
    "exit_hooks": {"observability"},
    "arrays": BELOW_TORCH,
    "torch": BELOW_TORCH | {"arrays"},
    "experimental": {"torch", "observability"},
    "sagemaker": {"torch", "smp"},
    "modelparallel": {"sagemaker", "torch", "smp", "observability"},
    "tensorflow": {"arrays", "smddp"},
    "estimator": {"launch", "smp"},
    "tools": {"estimator", "launch", "observability"},
}
TORCH_FREE = ("arrays", "estimator", "exit_hooks", "launch", "observability", "smp", "tools")
# Modules of those packages that exist to use torch, or are programs of a job.
NEEDS_TORCH = {"smddp.tools.bench_torch"}
# Names of such modules in the sentence on a package's imports.
NOT_PACKAGES = {"bench_torch"}
LONGEST = 400
# A class whose methods torch calls; its parts are in separate modules.
LONGER = {"smddp/torch/process_group.py": 460}


def _modules() -> dict[str, Path]:
    found = {}
    for file in sorted((ROOT / "smddp").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = _modules()


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yields the imports below `node`, also inside functions, without those for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        yield from _imports(child)


def _imported(file: Path) -> set[str]:
    """Returns the modules of smddp that `file` imports."""
    found = set()
    for node in _imports(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {path if path in MODULES else str(node.module) for path in paths}
    return found & MODULES.keys()


GRAPH = {module: _imported(file) - {module} for module, file in MODULES.items()}


def _package(module: str) -> str:
    """Returns the package below smddp that holds `module`; the module's own name for a file of smddp."""
    return module.split(".")[1] if "." in module else module


def test_modules_import_each_other_in_no_circle():
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_what_its_row_allows(package):
    allowed = ALLOWED[package] | FOUNDATION | {package}
    wrong = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        if _package(module) == package
        for other in sorted(others)
        if _package(other) not in allowed
    ]
    assert not wrong


def test_every_package_has_a_row():
    packages = {_package(module) for module, file in MODULES.items() if len(file.relative_to(ROOT).parts) > 2}
    assert packages == ALLOWED.keys()


def test_packages_state_their_purpose_names_and_imports():
    wrong = []
    for file in sorted((ROOT / "smddp").rglob("__init__.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        text = ast.get_docstring(tree) or ""
        assigned = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
        assigned |= {ast.unparse(node.target) for node in tree.body if isinstance(node, ast.AnnAssign)}
        if not text or "__all__" not in assigned:
            wrong.append(f"{file.relative_to(ROOT)}: needs a docstring and __all__")
        package = file.parent.name
        if file.parent.parent == ROOT / "smddp":
            sentence = re.search(r"^Imports [^.]*\.|(?<= )Imports [^.]*\.", text, re.MULTILINE)
            stated = set(re.findall("`([a-z_]+)`", sentence.group())) if sentence else None
            allowed = ALLOWED[package] & ALLOWED.keys()
            if stated is None or stated - NOT_PACKAGES != allowed:
                wrong.append(f"{file.relative_to(ROOT)}: states imports {stated}, allowed are {sorted(allowed)}")
            elif (package in TORCH_FREE) != ("no torch" in sentence.group()):
                wrong.append(f"{file.relative_to(ROOT)}: states wrongly that it imports no torch")
    assert not wrong, "\n".join(wrong)


def test_packages_without_torch_import_in_an_interpreter_without_torch():
    names = [
        module for module in MODULES if _package(module) in TORCH_FREE and "." in module and module not in NEEDS_TORCH
    ]
    program = (
        "import importlib, sys\n"
        "sys.modules['torch'] = None\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_files_are_short():
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in MODULES.values()}
    wrong = {name: count for name, count in lines.items() if count > LONGER.get(name, LONGEST)}
    assert not wrong
