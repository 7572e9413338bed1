"""A function that takes *args or **kwargs uses them, or says by an underscore that it does not."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "python"


def dropped(tree: ast.AST) -> list[str]:
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        body = function.body if isinstance(function.body, list) else [function.body]
        used = {node.id for part in body for node in ast.walk(part) if isinstance(node, ast.Name)}
        for argument in (function.args.vararg, function.args.kwarg):
            if argument is not None and not argument.arg.startswith("_") and argument.arg not in used:
                found.append(f"line {function.lineno}: {argument.arg}")
    return found


def test_no_function_drops_the_arguments_that_it_takes():
    found = {str(file.relative_to(ROOT)): dropped(ast.parse(file.read_text())) for file in sorted(ROOT.rglob("*.py"))}
    assert {file: lines for file, lines in found.items() if lines} == {}
