"""Environment section of `smddp info`: Python, limits of the machine, torch, a conflicting package."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata

from smddp import _historic
from smddp.observability import machine
from smddp.text import format_size


def collect() -> dict[str, str]:
    """Returns one line per item, by name. Imports torch if installed."""
    limits = machine.limits()
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {' '.join(platform.libc_ver())})",
        "kernel": platform.release(),
        "processor": _processor(),
        "memory that can be locked": _limit(limits["locked memory"], format_size),
        "open files": _limit(limits["open files"], str),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set: each rank starts a thread for every core"),
        "torch": torch(),
        "historic package": historic(),
    }


def _processor() -> str:
    lines = machine.read("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    found = machine.processors()
    nodes, quota = found["numa nodes"], found["quota"]
    granted = "" if quota is None else f"of which its cgroup grants {quota:g}, "
    return (
        f"{names[0] if names else platform.machine()}: {found['usable']} of {found['all']} processors usable by this "
        f"process, {granted}"
        f"{nodes} NUMA {'node' if nodes == 1 else 'nodes'}"
    )


def _limit(value: int | None, shown: Callable[[int], str]) -> str:
    return "unlimited" if value is None else shown(value)


def torch() -> str:
    """Returns torch's version and the state of the backend's registration."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
    try:
        import torch.distributed as dist
    except Exception as error:  # a broken installation may raise any exception
        return f"{version}, which cannot be imported: {type(error).__name__}: {error}"
    if not dist.is_available():
        return f"{version}, built without torch.distributed"
    if "smddp" in dist.Backend.backend_list:
        return f'{version}, has backend="smddp"'
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    return (
        f'{version}, has no backend="smddp": TORCH_DEVICE_BACKEND_AUTOLOAD={autoload} '
        "turns torch's search for backends off; `import smdistributed.dataparallel.torch.torch_smddp` registers it"
    )


def historic() -> str:
    """Returns the conflict with another distribution that owns the paths of `smdistributed`."""
    return _historic.conflict() or "not installed"
