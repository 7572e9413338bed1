"""Facts observed by one rank, as plain values for JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smddp._native import core
from smddp.observability import info, machine
from smddp.tools import environment

#: Seconds to wait for a driver or a library before it is reported as hanging.
PATIENCE = 8.0
# Variables for the number of ranks, the rendezvous address and the number of threads.
_VARIABLES = ("MASTER_ADDR", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def collect(launch: dict[str, int | None]) -> dict[str, Any]:
    """Returns all facts. launch: rank, size, local rank and local size of this process.

    Bounded in time even if a driver hangs.
    """
    problems: list[str] = []

    def attempt(what: str, ask: Callable[[], Any]) -> Any:
        try:
            return machine.within(PATIENCE, ask)
        except (OSError, RuntimeError, ValueError) as error:
            problems.append(f"{what}: {error}")
            return None

    found = attempt("the core", lambda: info.collect(start_cuda=True)) or {"problems": [], "settings": {}}
    settings = {name: {"value": row["value"], "from": row["from"]} for name, row in found["settings"].items()}
    return {
        "launch": launch,
        "pid": os.getpid(),
        "python": platform.python_version(),
        "version": found.get("version"),
        "torch": found.get("torch"),
        "historic": environment.historic(),
        "settings": settings,
        "unknown settings": sorted(found.get("unknown settings", [])),
        "problems": [*found["problems"], *problems],
        "core": found.get("machine", {}),
        "cuda": found.get("cuda"),
        "libfabric": attempt("libfabric", core().fabric) if found.get("machine") else None,
        "devices": sorted(
            str(path) for path in (*Path("/dev/infiniband").glob("uverbs*"), *Path("/dev").glob("nvidia[0-9]*"))
        ),
        "identity": machine.identity(),
        "limits": machine.limits(),
        "processors": machine.processors(),
        "memory": machine.memory(),
        "memfd": machine.memfd(),
        "refused calls": machine.refused_calls(),
        "abstract socket": machine.abstract_socket(),
        "kernel": machine.kernel(),
        "host name": machine.addresses(machine.identity()["host"]),
        "meeting place": machine.addresses(os.environ["MASTER_ADDR"]) if os.environ.get("MASTER_ADDR") else None,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
