"""Which rank this process is, as its launcher says, or the processes that the doctor starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Processes that it starts: enough to compare pairs, where there are processors for them.
_FEWEST, _MOST = 2, 4


@dataclass(frozen=True)
class Launch:
    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    #: Of the meeting; 0: any that is free.
    port: int

    def told(self) -> dict[str, int]:
        return {
            "rank": self.rank,
            "size": self.size,
            "local rank": self.local_rank,
            "local size": self.local_size,
        }


def launched(environment: Mapping[str, str]) -> Launch | None:
    """What torchrun (or whoever sets the same variables) says; None where nothing launched this process.

    The meeting is at MASTER_ADDR, one port above MASTER_PORT where torchrun's agent keeps its own store on that one, as
    smddp-bench does. Raises ValueError where the variables make no sense.
    """
    if "RANK" not in environment:
        return None

    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name, "" if default is None else str(default))
        if not text.isdigit():
            raise ValueError(f"{name} is {text!r}, which is no number; with RANK set a launcher sets it, too")
        return int(text)

    rank, size, port = number("RANK"), number("WORLD_SIZE"), number("MASTER_PORT")
    host = environment.get("MASTER_ADDR", "")
    if rank >= size or not host or not 0 < port < 65536:
        raise ValueError(f"RANK={rank}, WORLD_SIZE={size}, MASTER_ADDR={host!r}, MASTER_PORT={port} make no sense")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        port += 1 if port < 65535 else -1
    return Launch(rank, size, number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1), host, port)


def alone(ranks: int | None) -> Launch:
    """Rank 0 of so many processes here (None: as many as there are processors for, 2 to 4)."""
    usable = len(os.sched_getaffinity(0))
    size = ranks if ranks is not None else max(_FEWEST, min(_MOST, usable))
    return Launch(0, size, 0, size, "127.0.0.1", 0)


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
            command = [sys.executable, "-m", "smddp.cli", "doctor", *arguments]
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
