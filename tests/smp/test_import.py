"""Effects of `import torch.sagemaker`, in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks import forked


def run(code: str, **environment: str) -> str:
    """Runs code in a process with torch, and only the smddp modules that torch imports."""
    done = forked.run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_anew(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_fork_server_does_not_import_sagemaker():
    ours = ("torch.sagemaker", "smddp.sagemaker", "smdistributed")
    assert run(f"import sys; print([name for name in sys.modules if name.startswith({ours})])") == "[]\n"


def test_every_module_is_one_object_under_both_names():
    run(
        """
import importlib, pkgutil, sys
import torch
import torch.sagemaker as tsm
from torch.sagemaker import state, transform
import smddp.sagemaker
assert torch.sagemaker is tsm is smddp.sagemaker
names = [m.name for m in pkgutil.walk_packages(tsm.__path__, "smddp.sagemaker.")]
assert len(names) > 5, names
for name in names:
    alias = importlib.import_module(name.replace("smddp.sagemaker", "torch.sagemaker"))
    assert alias is importlib.import_module(name) and alias.__name__ == name, name
"""
    )


@pytest.mark.parametrize("package", ["torch.sagemaker", "smddp.sagemaker"])
def test_transform_is_the_function_for_every_import_form(package):
    run(
        f"""
import importlib, sys
from {package}.transform import transform
import torch.sagemaker as tsm
assert tsm.transform is transform and callable(transform)
for name in ("torch.sagemaker.transform", "smddp.sagemaker.transform"):
    assert importlib.import_module(name).transform is tsm.transform is transform
"""
    )


@pytest.mark.parametrize("first", ["import smddp", "import smdistributed.dataparallel.torch.torch_smddp"])
def test_it_works_with_torchs_autoload_switched_off(first):
    run_anew(f"{first}\nimport torch.sagemaker as tsm\ntsm.init", TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_a_real_torch_sagemaker_wins(tmp_path):
    out = run(
        f"""
import torch
(torch.__path__.append({str(tmp_path)!r}))
import pathlib
package = pathlib.Path({str(tmp_path)!r}) / "sagemaker"
package.mkdir()
(package / "__init__.py").write_text("theirs = True")
(package / "config.py").write_text("theirs = True")
import torch.sagemaker, torch.sagemaker.config
print(torch.sagemaker.theirs, torch.sagemaker.config.theirs)
"""
    )
    assert out.split() == ["True", "True"]


def test_init_without_a_launcher_raises_with_instructions():
    out = run(
        """
import os
for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
    os.environ.pop(name, None)
import torch.sagemaker as tsm
try:
    tsm.init()
except RuntimeError as error:
    print(error)
""",
    )
    assert "torchrun" in out


def test_init_makes_the_process_group_from_the_launchers_environment():
    out = run(
        """
import torch.sagemaker as tsm, torch.distributed as dist
tsm.init()
print(dist.get_backend(), tsm.state.world_size, tsm.is_initialized(), tsm.state.rep_rank_process_group)
""",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    assert out.split() == ["smddp", "1", "True", "None"]


def test_the_import_changes_no_more_of_torch_than_it_lists():
    out = run(
        """
import torch
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as loader
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
import inspect
before = FSDP.__init__, inspect.unwrap(loader).__code__, dict(vars(FSDP))
import torch.sagemaker as tsm
from smddp.sagemaker import torch_patches as patching
print(sorted(patch.name for patch in tsm.patches()))
changed = sorted(name for name, value in vars(FSDP).items() if before[2].get(name) is not value)
assert changed == ["__init__"], changed
assert inspect.unwrap(loader).__code__ is not before[1]
patching.undo_all()
print(tsm.patches())
assert FSDP.__init__ is before[0] and inspect.unwrap(loader).__code__ is before[1]
"""
    )
    assert out.splitlines() == ["['post_param_init_fn', 'sharded_optimizer']", "[]"]
