"""Ends of one rank of two, in many states: `python exits.py CELLS FOLDER` runs them and prints the outcomes as JSON.

Ranks are forked from this process, which has imported torch once, and end as scripts do, by the interpreter's exit.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Cells that run at the same time, and seconds until the ranks of one are killed.
TOGETHER = 4
SECONDS = 120.0
WIRES = ("shm", "tcp")

Keep = list[Any]


def idle(kept: Keep) -> None:
    pass


def works(kept: Keep) -> None:
    kept.append(dist.all_reduce(torch.ones(3), async_op=True))


def receives(kept: Keep) -> None:
    kept.append(dist.irecv(torch.ones(3), 1))


def sends(kept: Keep) -> None:
    kept.append(dist.isend(torch.ones(1 << 20), 1, tag=7))


def future(kept: Keep) -> None:
    kept.append(dist.irecv(torch.ones(3), 1).get_future().then(lambda done: done.value()))


def callback(kept: Keep) -> None:
    running = threading.Event()

    def slow(done: Any) -> torch.Tensor:
        running.set()
        time.sleep(0.3)
        return done.value()[0].sum()

    kept.append(dist.all_reduce(torch.ones(3), async_op=True).get_future().then(slow))
    running.wait()


def in_a_thread(kept: Keep) -> None:
    begun = dist.group.WORLD._get_sequence_number_for_group()
    threading.Thread(target=dist.barrier, daemon=True).start()
    while dist.group.WORLD._get_sequence_number_for_group() == begun:
        time.sleep(0.001)


def destroyed(kept: Keep) -> None:
    dist.destroy_process_group()


def last_collective() -> None:
    dist.all_reduce(tensor := torch.ones(3))
    print("the hook's sum is", tensor[0].item(), flush=True)


# Operations of rank 0 that are pending when it ends. "no group" and "exit hook" begin before the group is made.
STATES: dict[str, Callable[[Keep], None]] = {
    "no group": idle,
    "idle": idle,
    "work": works,
    "irecv": receives,
    "isend": sends,
    "future": future,
    "callback": callback,
    "exit hook": idle,
    "in a thread": in_a_thread,
    "destroyed": destroyed,
}


def fail() -> None:
    raise ValueError("the program's own error")


def by_signal(number: int) -> Callable[[], None]:
    def end() -> None:
        os.kill(os.getpid(), number)
        time.sleep(SECONDS)

    return end


# Ends of rank 0, each with its status.
ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "return": (lambda: None, 0),
    "exit 0": (lambda: sys.exit(0), 0),
    "exit 3": (lambda: sys.exit(3), 3),
    "raise": (fail, 1),
    "_exit": (lambda: os._exit(5), 5),
    "SIGTERM": (by_signal(signal.SIGTERM), -signal.SIGTERM),
    "SIGKILL": (by_signal(signal.SIGKILL), -signal.SIGKILL),
    "Ctrl-C": (by_signal(signal.SIGINT), -signal.SIGINT),
}
# Of these Python's exit hooks run.
SOFT = {"return", "exit 0", "exit 3", "raise", "Ctrl-C"}


def init(store: str, rank: int) -> None:
    dist.init_process_group(
        "smddp", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=SECONDS / 2)
    )
    dist.barrier()


def victim(state: str, end: str, store: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept: Keep = []
    if state == "exit hook":
        atexit.register(last_collective)
    if state != "no group":
        init(store, 0)
        STATES[state](kept)
    ENDS[end][0]()


def witness(state: str, end: str, store: str) -> None:
    """Rank 1: prints the class and the ranks of the error that it gets, or "none"."""
    report = "none"
    if state != "no group":
        init(store, 1)
        if state == "destroyed":
            dist.destroy_process_group()
        else:
            if state == "callback" or (state == "exit hook" and end in SOFT):
                dist.all_reduce(torch.ones(3))
            try:
                dist.recv(torch.ones(3), 0)
            except RuntimeError as error:
                report = f"{type(error).__name__} {error.ranks}"  # type: ignore[attr-defined]
    print(f"error: {report}", flush=True)
    os._exit(0)


def fork(role: Callable[..., None], rank: int, cell: tuple[str, str, str], place: str) -> int:
    """Returns the pid, and 0 in the child once its program has come to its end."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        file = os.open(f"{place}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.enable()
        if cell[2] == "tcp":
            os.environ["SMDDP_NODE"] = f"node{rank}"
        role(*cell[:2], place)
    return pid


def run(cells: list[tuple[str, str, str]], folder: str) -> list[dict[str, Any]] | None:
    """None: this is a rank whose program has come to its end. An exception of it comes through here, too."""
    begun, ended = [], []
    for number, cell in enumerate(cells):
        place, pids = f"{folder}/{number}", []
        for rank, role in enumerate((victim, witness)):
            pid = fork(role, rank, cell, place)
            if pid == 0:
                return None
            pids.append(pid)
        begun.append((cell, place, pids, time.monotonic() + SECONDS))
        while begun and (len(begun) == TOGETHER or number == len(cells) - 1):
            ended.append(finish(*begun.pop(0)))
    return ended


def finish(cell: tuple[str, str, str], place: str, pids: list[int], until: float) -> dict[str, Any]:
    status: dict[int, Any] = {}
    while len(status) < len(pids):
        for pid in pids:
            if pid in status:
                continue
            done, raw = os.waitpid(pid, os.WNOHANG)
            if done:
                status[pid] = os.waitstatus_to_exitcode(raw)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                status[pid] = "hangs"
        time.sleep(0.005)
    said = [Path(f"{place}.{rank}").read_text(errors="replace") for rank in range(2)]
    return {"cell": cell, "status": [status[pid] for pid in pids], "said": said}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run([tuple(cell) for cell in json.loads(sys.argv[1])], sys.argv[2])
    if found is not None:
        print(json.dumps(found))
