"""A sandbox may have no /proc and no /sys: every read of them has a value for that case."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def unguarded(text):
    """Lines that open a file of /proc or /sys outside of `read(...)`, a handler of OSError or `suppress(OSError)`."""
    found = []

    def visit(node, guarded):
        if isinstance(node, ast.Try):
            caught = any(ast.unparse(handler.type or ast.Name("OSError")).count("OSError") for handler in node.handlers)
            for child in node.body:
                visit(child, guarded or caught)
            for child in (*node.handlers, *node.orelse, *node.finalbody):
                visit(child, guarded)
            return
        if isinstance(node, ast.With):
            guarded = guarded or any("suppress(OSError" in ast.unparse(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            # Neither raises: `read` returns "", and `glob` finds nothing.
            guarded = guarded or name.split(".")[-1] in ("read", "glob")
            opens = name.split(".")[-1] in ("open", "listdir", "scandir", "readlink", "stat", "read_text", "read_bytes")
            if opens and not guarded and any(place in ast.unparse(node) for place in ("'/proc/", "'/sys/", "f'/proc/")):
                found.append(node.lineno)
                return
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    visit(ast.parse(text), False)
    return found


def test_every_read_of_proc_has_a_value_without_it():
    found = {path: unguarded(path.read_text()) for path in sorted((ROOT / "python").rglob("*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Path('/proc/self/status').read_text()", [1]),
        ("for fd in os.listdir('/proc/self/fd'):\n    pass", [1]),
        ("open(f'/proc/{pid}/stat')", [1]),
        ("try:\n    open('/sys/x')\nexcept ValueError:\n    pass", [2]),
        ("try:\n    open('/sys/x')\nexcept OSError:\n    pass", []),
        ("read('/proc/cpuinfo')", []),
        ("with contextlib.suppress(OSError):\n    os.readlink('/proc/self/exe')", []),
    ],
)
def test_unguarded_reads_are_found(text, lines):
    assert unguarded(text) == lines
