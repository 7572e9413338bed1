"""What `smddp info` tells of everything around the library: Python, the machine's limits, torch, another package."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

# What the historic package installs; it owns the same paths as we do, so pip writes one over the other without a word.
_HISTORIC = "smdistributed"


def collect() -> dict[str, str]:
    """One line for each thing, by its name. Imports torch where it is installed."""
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {' '.join(platform.libc_ver())})",
        "kernel": platform.release(),
        "processor": _processor(),
        "memory that can be locked": _limit(resource.RLIMIT_MEMLOCK, size),
        "open files": _limit(resource.RLIMIT_NOFILE, str),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set: each rank starts a thread for every core"),
        "torch": torch(),
        "historic package": historic(),
    }


def size(number: float) -> str:
    """With the unit that people read: "64 MiB"."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop()
    return f"{number:.4g} {units[-1]}"


def _processor() -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    usable, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count()
    return (
        f"{names[0] if names else platform.machine()}: {usable} of {all_of_them} processors usable by this process, "
        f"{nodes} NUMA {'node' if nodes == 1 else 'nodes'}"
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _limit(which: int, shown: Callable[[int], str]) -> str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else shown(soft)


def torch() -> str:
    """Whether torch knows the backend, or why it does not."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
    try:
        import torch.distributed as dist
    except Exception as error:  # whatever an installation breaks with is what is to be told
        return f"{version}, which cannot be imported: {type(error).__name__}: {error}"
    if not dist.is_available():
        return f"{version}, built without torch.distributed"
    if "SMDDP" in dist.Backend._plugins:
        return f'{version}, has backend="smddp"'
    autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    return (
        f'{version}, has no backend="smddp": TORCH_DEVICE_BACKEND_AUTOLOAD={autoload} '
        "turns torch's search for backends off; `import smdistributed.dataparallel.torch.torch_smddp` registers it"
    )


def historic() -> str:
    """Whether another distribution owns the paths of `smdistributed`."""
    owners = {name for name in metadata.packages_distributions().get(_HISTORIC, []) if name != "smddp"}
    theirs = sorted(
        f"{name} {metadata.version(name)}"
        for name in owners
        if any(str(path).startswith("smdistributed/dataparallel/") for path in metadata.files(name) or ())
    )
    if not theirs:
        return "not installed"
    return (
        f"{', '.join(theirs)} has files at the same paths as smddp: which ones are there depends on what was installed "
        f"last, and removing either removes them; `pip uninstall {theirs[0].split()[0]}`, then install smddp again"
    )
