"""Local launcher: starts, monitors and ends the ranks of this machine together."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from smddp.launch.environment import free_port
from smddp.launch.tagging import TaggedOutput

# Seconds after the first failure in which the other ranks may report it themselves, then before SIGTERM and SIGKILL.
_GRACE = 3.0
_ASKED = 5.0
_PR_SET_PDEATHSIG = 1


def count_devices() -> int:
    """Returns the number of CUDA devices of the driver; 0 without a driver."""
    from smddp._native import core

    return len(core().cuda(True)["devices"])


def signal_name(number: int) -> str:
    """Returns a signal's name, such as SIGKILL, or the number of a real-time signal, which has no name."""
    return next((each.name for each in signal.Signals if each == number), str(number))


def run(command: Sequence[str], size: int, program: str, tags_output: bool = False) -> int:
    """Start `size` ranks of `command` and wait for all of them. Returns the exit status.

    `tags_output`: each line of a rank's output begins with the rank.

    The status is 0 if all ranks succeeded, else that of the first failed rank (128 plus the number of a fatal signal).
    A failed rank, a SIGINT or SIGTERM to this process, or its exit ends the other ranks.
    """
    port = free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []
    output = TaggedOutput() if tags_output else None
    pipe = subprocess.PIPE if tags_output else None
    if size > 1 and "OMP_NUM_THREADS" not in os.environ:
        sys.stderr.write(f"{program}: OMP_NUM_THREADS=1 for each of {size} ranks; set it to use more threads\n")

    def ask(number: int, _: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for rank in range(size):
            environment = _environment(rank, size, port)
            if tags_output:
                environment.setdefault("PYTHONUNBUFFERED", "1")
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, preexec_fn=follow_parent)
            ranks.append(process)
            if output and process.stdout and process.stderr:
                output.add(rank, process.stdout, process.stderr)
        return _wait(ranks, asked, program, output)
    except OSError as error:
        sys.stderr.write(f"{program}: cannot start {command[0]!r}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
        if output:
            output.finish()


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    # The default of torch is a thread for each core, so several ranks would compete for the cores.
    threads = {"OMP_NUM_THREADS": "1"} if size > 1 else {}
    return {
        **threads,
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "NODE_RANK": "0",
        "SMDATAPARALLEL_LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def follow_parent() -> None:
    """Has the kernel send SIGTERM to this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(ranks: list[subprocess.Popen[bytes]], asked: list[int], program: str, output: TaggedOutput | None) -> int:
    running = dict(enumerate(ranks))
    status, until = 0, None
    while running:
        if asked:
            return 128 + asked[0]
        for rank, process in list(running.items()):
            ended = process.poll()
            if ended is None:
                continue
            del running[rank]
            if ended != 0 and status == 0:
                how = f"by signal {signal_name(-ended)}" if ended < 0 else f"with exit status {ended}"
                sys.stderr.write(f"{program}: rank {rank} (pid {process.pid}) ended {how}; the others follow\n")
                status, until = (128 - ended if ended < 0 else ended), time.monotonic() + _GRACE
        if until is not None and time.monotonic() > until:
            break
        if output:
            output.copy(0.02)
        else:
            time.sleep(0.02)
    return status


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ends all ranks."""
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + _ASKED
    for process in ranks:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
