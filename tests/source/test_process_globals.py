"""A forked child must not inherit a lock that another thread of the parent may hold."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Crates that user processes load. Test doubles and the benchmark program do not fork with user threads.
CRATES = sorted(path.parent for path in (ROOT / "crates").glob("[!f]*/Cargo.toml"))
LOCKS = r"\b(?:Mutex|RwLock|Condvar|LazyLock|LazyCell|OnceLock|PyOnceLock|Once|Barrier|Lazy)\b"

#: One-time cells that are set and never initialized in place, or whose initializer does not block.
ALLOWED = {
    ("smddp-core/src/sync/completion.rs", "INTERRUPT"): "set once with a function pointer",
    ("smddp-core/src/engine/wait_plan.rs", "CORES"): "reads one small file",
    ("smddp-core/src/observe/recorder/clock.rs", "BASE"): "reads two clocks",
    ("smddp-core/src/log.rs", "LOG"): "set once, never initialized in place",
    ("smddp-core/src/config/mod.rs", "CONFIG"): "a child keeps its parent's settings; read by the first call",
    ("smddp-core/src/kernels/level.rs", "BEST"): "reads processor flags",
    ("smddp-core/src/communicator/mod.rs", "FALLBACK"): "defaults of a table",
    ("smddp-py/src/callbacks.rs", "EXITING"): "set once with the id of a thread",
    ("smddp-py/src/buffers/numpy.rs", "TYPE"): "initialized under the interpreter lock, which fork holds",
    ("smddp-tensorflow/src/interface.rs", "FOUND"): "the initializer returns a value that was made before",
    ("smddp-base/src/fork.rs", "HOOK"): "one call of pthread_atfork",
    ("smddp-process/src/pool.rs", "BYTES"): "reads two small files",
    ("smddp-core/src/sync/caller_threads.rs", "CALLER"): "one value for each thread; its list is one per process",
    ("smddp-process/src/deadlock_probe.rs", "RECEIVER"): "set once with a function pointer",
    ("smddp-process/src/status.rs", "RESPONDER"): "set once with a function pointer",
    ("smddp-base/src/warning.rs", "WARN_HOOK"): "set once with a function pointer",
}
#: The same for module-level objects of Python.
ALLOWED_IN_PYTHON = {
    ("smddp/estimator/agent.py", "_lock"): "a separate program that starts children by exec",
    ("smddp/tensorflow/interrupt.py", "_handled"): "made anew in a forked child",
    ("smddp/tensorflow/interrupt.py", "_ended"): "made anew in a forked child",
}


def statics(text):
    """(name, type) of every `static` outside test code."""
    text = re.sub(r"//.*", "", text)
    text = re.split(r"#\[cfg\(test\)\]\s*mod tests \{", text)[0]
    return re.findall(r"\bstatic\s+(?:mut\s+)?(\w+)\s*:\s*([^=]+?)\s*=", text)


def thread_locals(text):
    return re.findall(r"thread_local!\s*\{(.*?)\n\s*\}", text, re.DOTALL)


def sources(crate):
    """Fuzzing targets and test modules are separate programs."""
    for path in sorted((crate / "src").rglob("*.rs")):
        if not re.search(r"/(tests|fuzzing)(/|\.rs$)|/\w*_?tests\.rs$|/for_tests\.rs$", path.as_posix()):
            yield path


def inherited(text):
    """Statics that are neither made anew in a child nor plainly free of locks."""
    return [(name, kind) for name, kind in statics(text) if not re.match(r"PerProcess<|\[?Atomic\w+|\[?&|Cell<", kind)]


def found_in_rust():
    return {
        (path.relative_to(ROOT / "crates").as_posix(), name): kind
        for crate in CRATES
        for path in sources(crate)
        for name, kind in inherited(path.read_text())
    }


def locks_in_python(text):
    """Names that a module binds to a lock, an event, a condition or a queue."""
    kinds = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Queue", "SimpleQueue"}
    for node in ast.parse(text).body:
        value = getattr(node, "value", None)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(value, ast.Call):
            continue
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        if called in kinds:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target)


def test_no_lock_of_the_engine_is_inherited_by_a_forked_child():
    found = {place: kind for place, kind in found_in_rust().items() if place not in ALLOWED}
    assert not found, "wrap these in smddp_base::fork::PerProcess: " + str(found)


def test_thread_locals_of_the_engine_hold_no_locks():
    held = [(path, body) for crate in CRATES for path in sources(crate) for body in thread_locals(path.read_text())]
    assert held, "the search finds thread-locals"
    assert not [(path, body) for path, body in held if re.search(LOCKS, body)]


def test_no_lock_of_a_python_module_is_inherited_by_a_forked_child():
    root = ROOT / "python"
    found = {
        (path.relative_to(root).as_posix(), name)
        for path in sorted(root.rglob("*.py"))
        for name in locks_in_python(path.read_text())
    }
    assert found - ALLOWED_IN_PYTHON.keys() == set()
    assert ALLOWED_IN_PYTHON.keys() - found == set(), "outdated entries"


def test_allowed_statics_exist():
    assert ALLOWED.keys() - found_in_rust().keys() == set(), "outdated entries"


@pytest.mark.parametrize(
    "text",
    [
        "static A: Mutex<u32> = Mutex::new(0);",
        "static A: HoldsALock = HoldsALock::new();",
        "fn f() {\n    static A: std::sync::Once = Once::new();\n}",
        "pub(crate) static A: LazyLock<Mutex<HashMap<i64, Pending>>> = LazyLock::new(Mutex::default);",
        "static A: [RwLock<u8>; 4] = [const { RwLock::new(0) }; 4];",
    ],
)
def test_lock_outside_per_process_is_found(text):
    assert [name for name, _ in inherited(text)] == ["A"]


def test_lock_inside_per_process_is_accepted():
    assert inherited("static A: PerProcess<(Mutex<Queue>, Condvar)> = PerProcess::new();") == []
