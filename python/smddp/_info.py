"""What `smddp.info()` and `smddp info` tell."""

from __future__ import annotations

import sys
from typing import Any

from smddp._native import core

COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
_SMALL = 4 << 10
_LARGE = 64 << 20
_F32 = 0


def paths(comm: Any) -> list[tuple[str, str, str]]:
    """(collective, path of a 4 KiB call, path of a 64 MiB call) of one communicator."""
    return [
        (name, comm.path(number, _F32, _SMALL), comm.path(number, _F32, _LARGE))
        for number, name in enumerate(COLLECTIVES)
    ]


def collect() -> dict[str, Any]:
    """Version, machine, settings, and the open groups with their paths."""
    native = core()
    return {
        "version": native.__version__,
        "core": native.__file__,
        "torch": _torch_version(),
        "machine": native.info(),
        "settings": {
            name: {"value": value, "default": default, "from": origin, "what": what}
            for name, value, default, origin, what in native.settings()
        },
        "groups": _groups(),
    }


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _groups() -> list[dict[str, Any]]:
    groups = sys.modules.get("smddp.process_group")
    if groups is None:
        return []
    return [
        {
            "name": group.communicator.name,
            "rank": group.rank(),
            "size": group.size(),
            "nodes": group.communicator.nodes(),
            "network": group.communicator.network(),
            "paths": {name: {"4 KiB": small, "64 MiB": large} for name, small, large in paths(group.communicator)},
        }
        for group in groups.open_groups()
    ]


def taken() -> dict[str, str]:
    """How the collectives of all open groups went, by name: "shm + tcp eth0 10.0.0.1 ring x 120 (1.2 GiB)"."""
    groups = sys.modules.get("smddp.process_group")
    ways: dict[str, dict[str, list[int]]] = {}
    for group in groups.open_groups() if groups else ():
        for collective, algorithm, operations, size in group.communicator.taken():
            way = "one rank" if group.size() == 1 else f"{group.communicator.way()} {algorithm}"
            total = ways.setdefault(collective, {}).setdefault(way, [0, 0])
            total[0] += operations
            total[1] += size
    return {
        collective: ", ".join(f"{way} x {operations} ({_amount(size)})" for way, (operations, size) in found.items())
        for collective, found in ways.items()
    }


def _amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def local_paths(ranks: int) -> list[tuple[str, str, str]]:
    """The paths that a group of `ranks` processes on this machine takes.

    It makes such a group for a moment, the ranks being threads of this process.
    Raises TopologyError where processes here cannot share memory.
    """
    from concurrent.futures import ThreadPoolExecutor
    from uuid import uuid4

    native = core()
    name = f"info-{uuid4().hex[:8]}"
    pending = [native.PendingComm(name, rank, ranks, 10.0) for rank in range(ranks)]
    cards = [one.card() for one in pending]
    with ThreadPoolExecutor(ranks) as pool:
        comms = list(pool.map(lambda one: one.connect(cards), pending))
        found = paths(comms[0])
        list(pool.map(lambda comm: comm.close(), comms))
    return found
