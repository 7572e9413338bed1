"""Ranks that die during group creation, and a stopped store: errors and delays, for test_making.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from smddp._register import register

SIZE = 5
LIMIT = timedelta(seconds=60)
SILENT_LIMIT = 2


def _init(rank: int, path: Path) -> None:
    dist.init_process_group("smddp", init_method=f"file://{path}", rank=rank, world_size=SIZE, timeout=LIMIT)


def _registered(path: Path) -> list[int]:
    """Returns the ranks registered in the store's file."""
    said = path.read_bytes() if path.exists() else b""
    return [rank for rank in range(SIZE) if f"smddp/card/{rank}".encode() in said]


def _await_ranks(path: Path, ranks: list[int]) -> None:
    while not set(ranks) <= set(_registered(path)):
        time.sleep(0.001)


class Round:
    """Group that loses a rank during its creation."""

    def __init__(self, directory: Path, victim: int, late: int) -> None:
        self.victim, self.late = victim, late
        self.path = directory / f"store-{victim}-{late}"
        self.pids: dict[int, int] = {}
        self.said, self.says = os.pipe()

    def start(self, rank: int, what: Callable[[int, Path], None]) -> None:
        """Starts a process that runs `what` and reports time and error of its failure."""
        pid = os.fork()
        if pid:
            self.pids[rank] = pid
            return
        try:
            what(rank, self.path)
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        os.write(self.says, json.dumps([rank, time.time(), text]).encode() + b"\n")
        os._exit(0)

    def kill(self) -> float:
        os.kill(self.pids[self.victim], signal.SIGKILL)
        os.waitpid(self.pids.pop(self.victim), 0)
        return time.time()

    def end(self, dead: float) -> list[tuple[int, float, str]]:
        """Returns each rank's report, and its delay after the death."""
        os.close(self.says)
        with os.fdopen(self.said) as said:
            found = [(rank, at - dead, text) for rank, at, text in map(json.loads, said)]
        for pid in self.pids.values():
            os.waitpid(pid, 0)
        return found


def died_in_init(directory: Path, victim: int, late: int) -> list[tuple[int, float, str]]:
    """`late` starts long after the death, so that the others wait for two ranks."""
    one = Round(directory, victim, late)
    others = [rank for rank in range(SIZE) if rank not in (victim, late)]
    for rank in others:
        one.start(rank, _init)
    _await_ranks(one.path, others)
    one.start(victim, _init)
    _await_ranks(one.path, [victim])
    dead = one.kill()
    time.sleep(0.5)
    one.start(late, _init)
    return one.end(dead)


def _init_and_new_group(rank: int, path: Path, victim: int) -> None:
    _init(rank, path)
    dist.barrier()
    if rank == victim:
        path.with_suffix(".ready").touch()
        signal.pause()
    dist.new_group(list(range(SIZE)), timeout=LIMIT)


def died_before_new_group(directory: Path, victim: int) -> list[tuple[int, float, str]]:
    one = Round(directory, victim, victim)
    for rank in range(SIZE):
        one.start(rank, lambda rank, path: _init_and_new_group(rank, path, victim))
    ready = one.path.with_suffix(".ready")
    while not ready.exists():
        time.sleep(0.001)
    return one.end(one.kill())


def under_a_silent_store(limit: timedelta) -> tuple[float, str]:
    """Stops the store's process. Returns the seconds until a rank fails, and its error."""
    here, there = os.pipe()
    server = os.fork()
    if not server:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(there, str(store.port).encode())
        signal.pause()
    try:
        store = dist.TCPStore("127.0.0.1", int(os.read(here, 9)), timeout=limit)
        os.kill(server, signal.SIGSTOP)
        begun, text = time.monotonic(), "no error"
        try:
            dist.init_process_group("smddp", store=store, rank=1, world_size=2, timeout=limit)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        return time.monotonic() - begun, text
    finally:
        os.kill(server, signal.SIGKILL)


def main() -> None:
    register()
    with tempfile.TemporaryDirectory() as directory:
        rounds = []
        # No rank sees the last one before it dies: its parent starts later.
        for victim, late in [(0, 1), (2, 4), (3, 0)]:
            rounds.append(("init", victim, died_in_init(Path(directory), victim, late)))
        for victim in (0, 3):
            rounds.append(("new_group", victim, died_before_new_group(Path(directory), victim)))
    # Runs last: ranks are forked from a process without threads of smddp.
    json.dump({"dead": rounds, "silent": under_a_silent_store(timedelta(seconds=SILENT_LIMIT))}, sys.stdout)


if __name__ == "__main__":
    main()
