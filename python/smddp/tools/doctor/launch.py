"""Which rank this process is, as its launcher says, or the processes that the doctor starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from smddp.launch import environment as variables

#: Processes that it starts: enough to compare pairs, where there are processors for them.
_FEWEST, _MOST = 2, 4
#: Processes that it starts on request, whatever the processors; 4 on each where those are more.
_MOST_RANKS = 16


@dataclass(frozen=True)
class Launch:
    rank: int
    size: int
    local_rank: int | None
    local_size: int
    host: str
    #: Of the meeting; 0: any that is free.
    port: int
    #: Whether the doctor started the ranks, and no launcher, so that they compute nothing.
    by_doctor: bool = False

    def facts(self) -> dict[str, int | None]:
        """The ranks and sizes that the launcher gave, by their names in the report."""
        return {
            "rank": self.rank,
            "size": self.size,
            "local rank": self.local_rank,
            "local size": self.local_size,
            "by doctor": self.by_doctor,
        }


def launched(by_doctor: bool = False) -> Launch | None:
    """This process's rank as its launcher's variables say, or the doctor's; None without them.

    Raises smddp.ConfigError, a ValueError, where the variables make no sense.
    """
    found = variables.launched()
    if found is None:
        return None
    rank, size, local_rank, local_size, meet = found
    host, port, _ = meet or ("127.0.0.1", 0, True)
    return Launch(rank, size, local_rank, local_size or 1, host, port, by_doctor)


def alone(ranks: int | None) -> Launch:
    """Rank 0 of so many processes here (None: as many as there are processors for, 2 to 4).

    Raises ValueError for more than this machine can run.
    """
    usable = len(os.sched_getaffinity(0))
    most = max(_MOST_RANKS, 4 * usable)
    if ranks is not None and ranks > most:
        raise ValueError(f"--ranks {ranks}: the doctor starts at most {most} processes on {usable} processors")
    size = ranks if ranks is not None else max(_FEWEST, min(_MOST, usable))
    return Launch(0, size, 0, size, "127.0.0.1", 0, by_doctor=True)


def start(launch: Launch, port: int, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """The other ranks, as children of this process. Raises OSError where one cannot be started; the others are ended.

    They end by themselves when this process, whose server they ask, is gone.
    """
    started: list[subprocess.Popen[bytes]] = []
    # Sockets that are found by name serve one user alone: nothing else is to be handed down.
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
    """Gives them so many seconds together, and ends those that are left."""
    for child in children:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            seconds = 0.0
            child.kill()
    for child in children:
        child.wait()
