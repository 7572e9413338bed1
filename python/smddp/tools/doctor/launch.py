"""Rank of this process from its launcher, or processes that the doctor starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from smddp.launch import environment as variables

#: Default range of started processes: enough to compare pairs, limited by the processors.
_FEWEST, _MOST = 2, 4
#: Maximum of --ranks, or 4 per processor if that is more.
_MOST_RANKS = 16


@dataclass(frozen=True)
class Launch:
    rank: int
    size: int
    local_rank: int | None
    local_size: int
    host: str
    #: Port of the rendezvous; 0: any free port.
    port: int
    #: True if the doctor started the ranks, which then compute nothing.
    by_doctor: bool = False

    def facts(self) -> dict[str, int | None]:
        """Returns the launcher's ranks and sizes, by their names in the report."""
        return {
            "rank": self.rank,
            "size": self.size,
            "local rank": self.local_rank,
            "local size": self.local_size,
            "by doctor": self.by_doctor,
        }


def launched(by_doctor: bool = False) -> Launch | None:
    """Returns the launch from the variables of a launcher or the doctor, or None without them.

    Raises smddp.ConfigError, a ValueError, for invalid variables.
    """
    found = variables.launched()
    if found is None:
        return None
    rank, size, local_rank, local_size, address = found
    host, port, _ = address or ("127.0.0.1", 0, True)
    return Launch(rank, size, local_rank, local_size or 1, host, port, by_doctor)


def alone(ranks: int | None) -> Launch:
    """Returns rank 0 of `ranks` local processes (None: one per processor, 2 to 4).

    Raises ValueError above the limit for this machine.
    """
    usable = len(os.sched_getaffinity(0))
    most = max(_MOST_RANKS, 4 * usable)
    if ranks is not None and ranks > most:
        raise ValueError(f"--ranks {ranks}: the doctor starts at most {most} processes on {usable} processors")
    size = ranks if ranks is not None else max(_FEWEST, min(_MOST, usable))
    return Launch(0, size, 0, size, "127.0.0.1", 0, by_doctor=True)


def start(launch: Launch, port: int, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Starts the other ranks as child processes. On an OSError, ends the started ones and raises it.

    The children exit when they lose the connection to this process.
    """
    started: list[subprocess.Popen[bytes]] = []
    # The children use the doctor's own rendezvous, not torchrun's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    try:
        for rank in range(1, launch.size):
            own = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": launch.size,
                "LOCAL_WORLD_SIZE": launch.size,
                "MASTER_ADDR": launch.host,
                "MASTER_PORT": port,
            }
            command = [sys.executable, "-m", "smddp.tools.cli", "doctor", "--by-doctor", *arguments]
            environment = {**kept, **{name: str(value) for name, value in own.items()}}
            started.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
    except OSError:
        end(started)
        raise
    return started


def end(children: Sequence[subprocess.Popen[bytes]], seconds: float = 0.0) -> None:
    """Waits for the children for `seconds` in total, then kills the remaining ones."""
    for child in children:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            seconds = 0.0
            child.kill()
    for child in children:
        child.wait()
