"""Facts and figures for `smddp.info()`, `smddp.paths()`, `smddp.traffic()` and `smddp info`."""

from __future__ import annotations

import os
import sys
from typing import Any

from smddp._native import core
from smddp.observability import log
from smddp.observability.values import Values
from smddp.text import format_size, nearest

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
#: Ranks of the group that `smddp info` makes of threads to learn its paths.
MOST_RANKS = 256
_SMALL = 4 << 10
_LARGE = 64 << 20
_F32 = 0


def paths(comm: Any) -> list[tuple[str, str, str]]:
    """Returns (collective, path of a 4 KiB call, path of a 64 MiB call) for a communicator."""
    return [
        (name, comm.path(number, _F32, _SMALL), comm.path(number, _F32, _LARGE))
        for number, name in enumerate(COLLECTIVES)
    ]


def say_paths(comm: Any) -> None:
    """Logs the paths of a new group's collectives at SMDDP_DEBUG=INFO, on its rank 0."""
    if comm.rank != 0 or comm.size == 1 or not log.is_enabled():
        return
    users: dict[str, list[str]] = {}
    for name, small, large in paths(comm):
        users.setdefault(f"{small} at 4 KiB, {large} at 64 MiB", []).append(name)
    shown = "; ".join(f"{', '.join(names)}: {path}" for path, names in users.items())
    log.info(f"group {comm.name} of {comm.size} ranks: {shown}")


def collect(start_cuda: bool = False) -> dict[str, Any]:
    """Returns the version, the machine, the settings, and the open groups with their paths.

    "problems" has a line for each error that hides other facts, such as an invalid setting. "deprecated settings" maps
    each deprecated name to its replacement, the equivalent values, and its value in the environment, or None.
    """
    native = core()
    problems = []
    try:
        machine = native.info()
    except ValueError as error:
        machine = {}
        problems.append(str(error))
    settings = {
        name: {"value": value, "default": default, "from": origin, "what": what}
        for name, value, default, origin, what in native.settings()
    }
    deprecated = {
        name: {"replacement": replacement, "equivalents": equivalents, "value": os.environ.get(name)}
        for name, replacement, equivalents in native.deprecated_settings()
    }
    return {
        "version": native.__version__,
        "core": native.__file__,
        "torch": _torch_version(),
        "problems": problems,
        "unknown settings": _unknown(settings, deprecated),
        "machine": machine,
        "cuda": cuda(start_cuda),
        "settings": settings,
        "deprecated settings": deprecated,
        "groups": _groups(),
    }


def _unknown(settings: dict[str, Any], deprecated: dict[str, Any]) -> dict[str, str | None]:
    """Returns unknown SMDDP_ variables of the environment, each with the nearest setting, as the core warns of them."""
    others = ("SMDDP_TEST_", "SMDDP_AG_")
    names = [name for name in os.environ if name.startswith("SMDDP_") and name not in {*settings, *deprecated}]
    return {name: nearest(name, settings) for name in sorted(names) if not name.startswith(others)}


def cuda(start: bool = False) -> dict[str, Any]:
    """Returns the core's facts about CUDA, and "paths": the paths of calls on CUDA tensors.

    start: initializes the driver to list the devices. Children forked afterwards cannot use CUDA, so a program that
    does not use CUDA yet leaves it False.
    """
    found = dict(core().cuda(start or _cuda_in_use()))
    found["paths"] = (
        {
            "in a node": "read from the peers' memory by copy engines (CUDA IPC), reductions by one kernel",
            "elsewhere": "through pinned host memory: between nodes, and where IPC is impossible",
            "send, recv": "through pinned host memory",
        }
        if found["found"]
        else {}
    )
    return found


def _cuda_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _groups() -> list[dict[str, Any]]:
    return [
        {
            "name": comm.name,
            "rank": comm.rank,
            "size": comm.size,
            "nodes": comm.nodes(),
            "network": comm.network(),
            "paths": {name: {"4 KiB": small, "64 MiB": large} for name, small, large in paths(comm)},
        }
        for comm in (group.communicator for group in _open_groups())
    ]


def taken() -> dict[str, str]:
    """Returns the paths used by the collectives of all open groups: "shm + tcp eth0 10.0.0.1 ring x 120 (1.2 GiB)"."""
    used: dict[str, dict[str, list[int]]] = {}
    for comm in (group.communicator for group in _open_groups()):
        for collective, algorithm, operations, size, _crossed in comm.path_counters():
            path = "one rank" if comm.size == 1 else f"{comm.transports()} {algorithm}"
            total = used.setdefault(collective, {}).setdefault(path, [0, 0])
            total[0] += operations
            total[1] += size
    return {
        collective: ", ".join(
            f"{path} x {operations} ({format_size(total)})" for path, (operations, total) in found.items()
        )
        for collective, found in used.items()
    }


def traffic() -> list[dict[str, Any]]:
    """Returns the operations and bytes of all open groups, per group, collective and algorithm.

    Each entry holds group (its name), size (ranks), nodes (spanned by the group), way (the path), collective,
    algorithm, operations, bytes and crossed. bytes: sum of the operations' whole buffers. A rank of N contributes or
    receives 1/N of them in an all_gather or reduce_scatter, and all in an all_reduce. crossed: bytes that this rank
    sent to other nodes, in the format of SMDDP_WIRE_FORMAT. Point-to-point messages have "collective": "send", with
    one entry for the own node ("nodes": 1) and one for other nodes ("nodes": 2).
    """
    found = []
    for group in _open_groups():
        communicator, nodes = group.communicator, group.communicator.nodes()
        moved = [(len(set(nodes)), *entry) for entry in communicator.path_counters()]
        for spanned in (1, 2):
            mine = nodes[communicator.rank]
            sent = [counts for peer, counts in group.sent.items() if len({nodes[peer], mine}) == spanned]
            if sent:
                operations, size = (sum(counts) for counts in zip(*sent))
                moved.append((spanned, "send", "point-to-point", operations, size, size * (spanned - 1)))
        for spanned, collective, algorithm, operations, size, crossed in moved:
            found.append(
                {
                    "group": communicator.name,
                    "size": communicator.size,
                    "nodes": spanned,
                    "way": communicator.transports(),
                    "collective": collective,
                    "algorithm": algorithm,
                    "operations": operations,
                    "bytes": size,
                    "crossed": crossed,
                }
            )
    return found


def communicators() -> dict[str, Any]:
    """Returns the communicators of all open groups by name."""
    return {group.communicator.name: group.communicator for group in _open_groups()}


def _open_groups() -> list[Any]:
    """Returns the open groups of torch and of `smddp.init`."""
    fronts = [sys.modules.get(name) for name in ("smddp.torch.process_group", "smddp.arrays.communicator")]
    return [group for front in fronts if front is not None for group in front.open_groups()]


def local_paths(ranks: int) -> list[tuple[str, str, str]]:
    """Returns the paths of a group of `ranks` processes on this machine.

    Creates a temporary group whose ranks are threads of this process.
    Raises TopologyError if processes cannot share memory.
    """
    from concurrent.futures import ThreadPoolExecutor
    from uuid import uuid4

    name, store = f"info-{uuid4().hex[:8]}", Values()
    with ThreadPoolExecutor(ranks) as pool:
        comms = list(
            pool.map(lambda rank: core().Comm.make(store, "create_group", name, rank, ranks, 10.0), range(ranks))
        )
        found = paths(comms[0])
        list(pool.map(lambda comm: comm.close(), comms))
    return found
