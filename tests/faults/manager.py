"""Starts and kills members, selects the remaining ones, and measures the recovery time."""

from __future__ import annotations

import datetime
import multiprocessing.connection
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from ranks import process

from faults import member

# Torch is imported once, in the server that members are forked from; the first ones may have to wait for that.
_START = 120.0


@dataclass
class Kill:
    """One death: number of survivors, and seconds from the kill to the last survivor's first correct result."""

    survivors: int
    seconds: float
    errors: list[str] = field(default_factory=list)


@dataclass
class _Process:
    process: Any
    pipe: Any
    handle: str = ""


class Manager:
    """nodes: number of simulated nodes; `environment` selects the transport between them."""

    def __init__(self, size: int, nodes: int = 1, environment: dict[str, str] | None = None, seed: int = 0) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=60))
        self._size, self._nodes, self._environment = size, nodes, environment or {}
        self.random = random.Random(seed)
        self._members: dict[int, _Process] = {}
        self._next = self._uuid = 0

    def __enter__(self) -> Manager:
        for _ in range(self._size):
            self.begin_member()
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._members.values():
            each.process.kill()
        for each in self._members.values():
            each.process.join()
            each.pipe.close()
        self._members.clear()

    def begin_member(self) -> int:
        """Starts a process, which is a member from the next `settle` on."""
        number, self._next = self._next, self._next + 1
        environment = dict(self._environment, OMP_NUM_THREADS="1")
        if self._nodes > 1:
            environment["SMDDP_NODE"] = f"n{number % self._nodes}"
        address = ("127.0.0.1", self._store.port)
        self._members[number] = _Process(*process.start(member.run, number, address, environment=environment))
        return number

    def members(self) -> list[int]:
        return sorted(self._members)

    def await_handles(self) -> None:
        for number, each in self._members.items():
            until = time.monotonic() + _START
            while not each.handle:
                if not each.pipe.poll(max(0.0, until - time.monotonic())):
                    raise AssertionError(f"member {number} does not start")
                self._hear(number, each.pipe.recv(), {}, [])

    def settle(self, shuffle: bool = False) -> float:
        """Reconfigures all live members. Returns the seconds until the last one's first correct result."""
        self.await_handles()
        begun = time.monotonic()
        order = self.members()
        if shuffle:
            self.random.shuffle(order)
        self._uuid += 1
        handles = [self._members[number].handle for number in order]
        for number in order:
            self._members[number].pipe.send({"uuid": self._uuid, "members": order, "handles": handles})
        return self._all_right(order, []) - begun

    def _all_right(self, order: list[int], errors: list[str]) -> float:
        right: dict[int, float] = {}
        until = time.monotonic() + 2 * member.SECONDS
        while len(right) < len(order):
            waiting = {self._members[number].pipe: number for number in order if number not in right}
            found = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not found:
                late = sorted(waiting.values())
                raise AssertionError(f"members {late} hang in configuration {self._uuid} of {order}: {errors}")
            for pipe in found:
                number = waiting[pipe]  # type: ignore[index]
                try:
                    word = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(f"member {number} exited unexpectedly in configuration {self._uuid}") from None
                self._hear(number, word, right, errors)
        return max(right.values())

    def _hear(self, number: int, word: tuple, right: dict[int, float], errors: list[str]) -> None:
        kind, *rest = word
        if kind == "failed":
            raise AssertionError(f"member {number}: {rest[-1]}")
        if kind == "handle":
            self._members[number].handle = rest[-1]
        elif kind == "right" and rest[1] == self._uuid:
            right[number] = rest[2]
        elif kind == "lost":
            errors.append(f"member {number} in {rest[1]}: {rest[2]}")

    def kill(self, numbers: list[int], sign: int = signal.SIGKILL) -> Kill:
        """Kills members together. The others continue after the first error or once the killed are reaped."""
        killed = [self._members.pop(number) for number in numbers]
        begun = time.monotonic()
        for each in killed:
            os.kill(each.process.pid, sign)
        order, errors = self.members(), []
        survivors = [self._members[number].pipe for number in order]
        multiprocessing.connection.wait([*survivors, *(each.process.sentinel for each in killed)], _START)
        self._uuid += 1
        handles = [self._members[number].handle for number in order]
        for number in order:
            self._members[number].pipe.send({"uuid": self._uuid, "members": order, "handles": handles})
        ended = self._all_right(order, errors)
        for each in killed:
            each.process.join()
            each.pipe.close()
        return Kill(len(order), ended - begun, errors)
