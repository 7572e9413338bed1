"""Private names of torch, transformers and Accelerate: imported in one module per package, and declared there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from smddp.modelparallel import private_names as of_modelparallel
from smddp.sagemaker import private_names as of_sagemaker
from smddp.torch import compat
from smddp.torch.private_names import PrivateName

ROOT = Path(__file__).parents[2] / "python/smddp"
FOREIGN = {"torch", "transformers", "accelerate", "peft"}
MODULES = {"torch/compat.py", "sagemaker/private_names.py", "modelparallel/private_names.py"}
PACKAGES = ("torch", "experimental", "sagemaker", "modelparallel")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
# Attributes that torch's own classes cannot do without, so that no release lacks them alone.
OF_TORCH = {
    "_parameters": "table of nn.Module",
    "_buffers": "table of nn.Module",
    "_modules": "table of nn.Module",
    "_non_persistent_buffers_set": "table of nn.Module",
    "_forward_pre_hooks": "table of nn.Module",
    "_version": "counter of a tensor, documented with autograd",
    "_base": "base of a view, documented with tensor views",
    "_nnz": "number of elements of a sparse tensor, documented with torch.sparse",
    "_schema": "signature of an operator that a dispatch mode gets",
    "_local_tensor": "slot of DTensor, which to_local() reads",
    "_world": "state of torch.distributed.distributed_c10d",
    "_get_backend": "method that dispatches every collective",
    "_set_group_name": "call of every constructor of a group",
    "_set_group_desc": "call of every constructor of a group",
    "_register_backend": "call of every constructor of a group",
    "_set_default_backend": "call of every constructor of a group",
    "_timeout": "field of a backend's options",
    "_DistributedBackendOptions": "argument of an extended creator of a backend",
    "_create_internal": "guarded constructor of the fake group of torch's own tests",
    "_plugins": "guarded in compat.backend_plugins",
    "_params": "list of an LBFGS optimizer, which its step reads; and FSDP1's list, declared",
    "_fields": "of named tuples",
    "_getframe": "of sys",
    "_exit": "of os",
}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _own_names() -> set[str]:
    """Returns the private names that smddp itself defines."""
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and re.fullmatch(r"_(tp|ep|smp|idle|c10d)_\w+", str(node.value)):
                found.add(node.value)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _imports(node: ast.AST) -> Iterator[str]:
    """Yields the private paths that an import statement names."""
    paths = []
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    for path in paths:
        if path.split(".")[0] in FOREIGN and any(map(_is_private, path.split("."))):
            yield path


def _declared() -> set[str]:
    tables = (compat, of_sagemaker, of_modelparallel)
    names = {each.attribute for table in tables for each in vars(table).values() if isinstance(each, PrivateName)}
    return names.union(of_sagemaker.OF_HANDLE, of_sagemaker.OF_FLAT_PARAMETER, of_sagemaker.FLAT_PARAMETER_DATA)


def _uses(file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each private attribute of a foreign object."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_self(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
                name = node.args[1]
                if isinstance(name, ast.Constant) and _is_private(str(name.value)) and not _is_self(node.args[0]):
                    yield node.lineno, str(name.value)


def test_private_names_are_imported_in_one_module_per_package():
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno} imports {path}"
        for file in FILES
        if str(file.relative_to(ROOT)) not in MODULES
        for node in ast.walk(_tree(file))
        for path in _imports(node)
    ]
    assert not wrong


def test_private_attributes_are_declared():
    known = _own_names() | _declared() | OF_TORCH.keys()
    wrong = [
        f"{file.relative_to(ROOT)}:{line} uses {name}"
        for file in FILES
        if str(file.relative_to(ROOT)) not in MODULES
        for line, name in _uses(file)
        if name not in known
    ]
    assert not wrong


def test_every_reason_is_needed():
    used = {name for file in FILES for _, name in _uses(file)}
    assert OF_TORCH.keys() - used == set()
