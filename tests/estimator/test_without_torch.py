"""Estimators and `smddp launch` on a host without torch. With torch, the launching process does not import it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Refuses torch and TensorFlow as an interpreter without them does; "present" only reports an import.
PREAMBLE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "tensorflow"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
if "absent" in sys.argv:
    sys.meta_path.insert(0, Refuse())
"""
LAUNCH = PREAMBLE + (
    """
from smddp.estimator import HuggingFace, PyTorch, TensorFlow
on = {"enabled": True}
v1 = {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}
v2 = {"modelparallel": {"enabled": True, "parameters": {"tensor_parallel_degree": 2}}}
p4d = {"instance_type": "ml.p4d.24xlarge", "instance_count": 1}
made = [
    PyTorch("t.py", image_uri="x", distribution={"torch_distributed": on}, **p4d),
    PyTorch("t.py", image_uri="x", distribution={"smdistributed": v1, "mpi": on}, **p4d),
    PyTorch("t.py", image_uri="x", distribution={"smdistributed": v2, "torch_distributed": on}, **p4d),
    HuggingFace("py310", "t.py", image_uri="x", **p4d),
    TensorFlow("py310", "2.14", entry_point="t.py", distribution={"smdistributed": {"dataparallel": on}}, **p4d),
]
for each in made:
    assert each.commands()
from smddp.estimator import shell
assert shell.main(["t.py", "--dry-run", "-n", "2"]) == 0
assert shell.main(["t.py", "--distribution", "{}", "--job-name", "j"]) == 0
assert "torch" not in sys.modules and "tensorflow" not in sys.modules
"""
)


@pytest.mark.parametrize("torch", ["absent", "present"])
def test_the_launching_process_needs_no_torch(tmp_path: Path, torch: str):
    (tmp_path / "t.py").write_text("print('trained')\n")
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, torch],
        cwd=tmp_path,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
