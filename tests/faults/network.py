"""Network faults of the fault matrix, on the lab's hosts (bench/lab/netlab)."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path

from hosts import netlab

#: What the lab does to one host. "deaf": its own data still arrives. Lost packets are retransmitted, so
#: no rank may fail.
FAULTS = {
    "cut": ("cut", {}),
    "drop": ("isolate", {}),
    "deaf": ("blackhole", {}),
    "loss": ("loss", {"to": "15%"}),
}
#: Seconds after which a silent host is lost, and what a call has: it is to end by that, not by its own deadline.
SILENCE, LIMIT = 2.0, 6.0
#: Seconds for which the others wait for a rank before its network goes, in some cells.
WAIT = 1.5
#: Where the store is, which no fault reaches.
STORES_HOST, STORE = 0, "10.77.0.1"
_HOSTS = 4
# Not "mnt": /proc would be that of the host's processes, of which ours is none. Nor are they of another "pid".
_SPACES = ("net", "uts", "ipc")


def why_not() -> str | None:
    return netlab.why_not("--loss")


def in_lab() -> bool:
    return "NETLAB_DIR" in os.environ


def again_in_lab(module: str, arguments: list[str]) -> int:
    """Runs the module beside hosts. Frames are of one packet each, so that it is felt if some are lost."""
    # Hosts have no name server, which torch's sockets would log each time.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    up = ["up", "--hosts", str(_HOSTS), "--no-gso", "--", sys.executable, "-W", "ignore", "-m", module, *arguments]
    return os.spawnl(os.P_WAIT, sys.executable, sys.executable, str(netlab.NETLAB), *up)


def host_of(rank: int, size: int) -> int:
    """Two hosts and more, with two ranks each where there are so many."""
    return rank % min(_HOSTS, max(2, size // 2))


def settings() -> dict[str, str]:
    return {"SMDDP_PEER_TIMEOUT": str(SILENCE), "FI_TCP_IFACE": "eth0"}


def enter(host: int) -> None:
    """Moves this process, which has one thread, into a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.environ["NETLAB_PIDS"].split()[host]
    for name in _SPACES:
        space = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"setns into host {host}")
        os.close(space)


def disturb(fault: str, host: int) -> None:
    action, more = FAULTS[fault]
    _ask(action, host, more)


def restore(host: int) -> None:
    _ask("restore", host, {})


def _ask(action: str, host: int, more: dict[str, str]) -> None:
    question = {"do": "fault", "action": action, "args": {"host": str(host), **more}}
    with socket.socket(socket.AF_UNIX) as lab:
        lab.connect(str(Path(os.environ["NETLAB_DIR"]) / "ctl"))
        lab.sendall(json.dumps(question).encode() + b"\n")
        answer = json.loads(lab.makefile().readline())
    if answer["rc"]:
        raise RuntimeError(answer["error"])
