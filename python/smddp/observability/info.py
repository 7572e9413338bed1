"""What `smddp.info()` and `smddp info` tell."""

from __future__ import annotations

import os
import sys
from typing import Any

from smddp._native import core
from smddp.observability import log
from smddp.text import nearest

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
    """(collective, path of a 4 KiB call, path of a 64 MiB call) of one communicator."""
    return [
        (name, comm.path(number, _F32, _SMALL), comm.path(number, _F32, _LARGE))
        for number, name in enumerate(COLLECTIVES)
    ]


def say_paths(comm: Any) -> None:
    """One line by a new group's first rank, with SMDDP_DEBUG=INFO: the paths, and which collectives take them."""
    if comm.rank != 0 or comm.size == 1 or not log.wanted():
        return
    takers: dict[str, list[str]] = {}
    for name, small, large in paths(comm):
        takers.setdefault(f"{small} at 4 KiB, {large} at 64 MiB", []).append(name)
    shown = "; ".join(f"{', '.join(names)}: {way}" for way, names in takers.items())
    log.tell(f"group {comm.name} of {comm.size} ranks: {shown}")


def collect(start_cuda: bool = False) -> dict[str, Any]:
    """Version, machine, settings, and the open groups with their paths.

    "problems" has a line for each thing that keeps the rest from being told, such as a setting that is not valid.
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
    return {
        "version": native.__version__,
        "core": native.__file__,
        "torch": _torch_version(),
        "problems": problems,
        "unknown settings": _unknown(settings),
        "machine": machine,
        "cuda": cuda(start_cuda),
        "settings": settings,
        "groups": _groups(),
    }


def _unknown(settings: dict[str, Any]) -> dict[str, str | None]:
    """Variables of the environment that no setting is called by, as the core warns of them, each with the nearest."""
    others = ("SMDDP_TEST_", "SMDDP_AG_")
    names = [name for name in os.environ if name.startswith("SMDDP_") and name not in settings]
    return {name: nearest(name, settings) for name in sorted(names) if not name.startswith(others)}


def cuda(start: bool = False) -> dict[str, Any]:
    """What the core knows of CUDA here, and "paths": the way that calls on CUDA tensors would take.

    start: the driver may be initialised to tell its devices. Children forked afterwards cannot use CUDA, so a program
    that does not use it yet is not asked for them.
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
    """How the collectives of all open groups went, by name: "shm + tcp eth0 10.0.0.1 ring x 120 (1.2 GiB)"."""
    ways: dict[str, dict[str, list[int]]] = {}
    for comm in (group.communicator for group in _open_groups()):
        for collective, algorithm, operations, size, _crossed in comm.taken():
            way = "one rank" if comm.size == 1 else f"{comm.way()} {algorithm}"
            total = ways.setdefault(collective, {}).setdefault(way, [0, 0])
            total[0] += operations
            total[1] += size
    return {
        collective: ", ".join(f"{way} x {operations} ({_amount(size)})" for way, (operations, size) in found.items())
        for collective, found in ways.items()
    }


def traffic() -> list[dict[str, Any]]:
    """What the collectives and sends of all open groups moved, per group, collective and algorithm.

    Each entry holds group (its name), size (ranks), nodes (how many the group spans), way, collective, algorithm,
    operations, and bytes: the sum of the operations' whole buffers, of which a rank of N contributes or gets 1/N
    in an all_gather or reduce_scatter, and all in an all_reduce; crossed: of bytes that travelled, those that this
    rank itself sent to ranks of other nodes, in the format that SMDDP_WIRE_FORMAT gave them. Point-to-point messages
    that this rank sends to other ranks have an entry for those to its own node ("nodes": 1) and one for those to
    others ("nodes": 2), with "collective": "send".
    """
    found = []
    for group in _open_groups():
        communicator, nodes = group.communicator, group.communicator.nodes()
        moved = [(len(set(nodes)), *entry) for entry in communicator.taken()]
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
                    "way": communicator.way(),
                    "collective": collective,
                    "algorithm": algorithm,
                    "operations": operations,
                    "bytes": size,
                    "crossed": crossed,
                }
            )
    return found


def _open_groups() -> list[Any]:
    """torch's groups, and those of `smddp.init`."""
    fronts = [sys.modules.get(name) for name in ("smddp.torch.process_group", "smddp.arrays.communicator")]
    return [group for front in fronts if front is not None for group in front.open_groups()]


def _amount(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class _Values:
    """A store for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key]

    def delete_key(self, key: str) -> None:
        self._values.pop(key, None)


def local_paths(ranks: int) -> list[tuple[str, str, str]]:
    """The paths that a group of `ranks` processes on this machine takes.

    It makes such a group for a moment, the ranks being threads of this process.
    Raises TopologyError where processes here cannot share memory.
    """
    from concurrent.futures import ThreadPoolExecutor
    from uuid import uuid4

    name, store = f"info-{uuid4().hex[:8]}", _Values()
    with ThreadPoolExecutor(ranks) as pool:
        comms = list(pool.map(lambda rank: core().Comm.make(store, "making it", name, rank, ranks, 10.0), range(ranks)))
        found = paths(comms[0])
        list(pool.map(lambda comm: comm.close(), comms))
    return found
