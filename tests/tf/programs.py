"""Starts ranks of `run.py` and collects their reports."""

import ast
import functools
import importlib.util
import json
from pathlib import Path

import pytest
from ranks.launching import outputs, start

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed: make test-tensorflow", allow_module_level=True)

HERE = Path(__file__).parent


def cases(module: str) -> list[str]:
    """Names of a module's cases, without importing it."""
    tree = ast.parse((HERE / "cases" / f"{module}.py").read_text())
    return [node.name[5:] for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")]


@functools.cache
def results(module: str, size: int, names: tuple[str, ...] = ()) -> tuple[dict, str]:
    """Runs the cases of a module, or those of `names`. Returns each rank's results by case, and all output."""
    found: dict = {}
    output = ""
    command = [str(HERE / "run.py"), module, *(f"case_{name}" for name in names)]
    for _, out in outputs(start(command, size, OMP_NUM_THREADS="1"), 250):
        for said in words(out):
            found.setdefault(said["case"], {})[said["rank"]] = said
        output += out[-3000:]
    return found, output


def words(output: str) -> list[dict]:
    """The lines of JSON that a rank's tests wrote among other lines."""
    return [json.loads(line[1:]) for line in output.splitlines() if line.startswith("@{")]


def check(module: str, case: str, size: int) -> None:
    """The case ended well on every one of `size` ranks of this machine."""
    verdict(results(module, size), case, size)


def verdict(said_and_output: tuple[dict, str], case: str, size: int) -> None:
    found, output = said_and_output
    ranks = found.get(case, {})
    errors = [f"rank {rank}: {said['error']}" for rank, said in sorted(ranks.items()) if said["error"]]
    assert not errors, "\n".join(errors)
    assert len(ranks) == size, f"only ranks {sorted(ranks)} ended {case}:\n{output}"
    if reason := ranks[0]["skipped"]:
        pytest.skip(reason)
