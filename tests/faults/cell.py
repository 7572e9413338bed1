"""One cell of the fault matrix: ranks make a correct call, then one with a fault, and report the results."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

from backend.calls import LARGE, SMALL

from faults import acts, network

_COUNTS = (SMALL, LARGE)
# Maximum delay of a fault after a rank has started to create or destroy the default group, in seconds.
_SOON = 0.03


def run(pipe: Any, plan: dict, rank: int) -> None:
    """Rank `rank` of the cell.

    Says ("fault", time), ("raised", time, text), ("right", time), ("left", time) or ("wrong", text). Who says "fault"
    goes on when it has an answer, if it still can.
    """
    acts.LIMIT = timedelta(seconds=limit(plan))
    if plan["fault"] in network.FAULTS:
        network.enter(network.host_of(rank, plan["size"]))
    elif plan["way"] != "shm":
        os.environ["SMDDP_NODE"] = f"n{rank % 2}"
    # As long as the timeout of a call.
    os.environ["SMDDP_LEAVE_SECONDS"] = str(acts.LIMIT.total_seconds())
    try:
        _live(plan, rank, pipe)
    except BaseException as error:
        with contextlib.suppress(OSError):
            pipe.send(("raised", time.monotonic(), f"{type(error).__name__}: {error}"))
    finally:
        # Exits without destroy_process_group, like a failed script; the manager ends the remaining ranks.
        if rank == plan["victim"] and plan["fault"] == "exception":
            time.sleep(60)
        os._exit(0)


def limit(plan: dict) -> float:
    return network.LIMIT if plan["fault"] in network.FAULTS else acts.LIMIT.total_seconds()


def _live(plan: dict, rank: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    victim, call = rank == plan["victim"], plan["call"]
    # After its fault. A rank survives a network fault.
    halts = victim and plan["fault"] not in network.FAULTS
    store = dist.PrefixStore(plan["prefix"], dist.TCPStore(*plan["store"], timeout=acts.LIMIT))
    if victim and call == "init":
        _fail_soon(plan, pipe)
    dist.init_process_group("smddp", store=store, rank=rank, world_size=plan["size"], timeout=acts.LIMIT)
    if halts and call == "init":
        time.sleep(60)
    count = _COUNTS[plan["seed"] % 2]

    def make(name: str, *, fails: bool) -> None:
        works, found, right = acts.begin(name, count)
        if fails:
            _fail(plan, pipe)
        for work in works:
            work.wait()
        if not all(map(torch.equal, found, right)):
            pipe.send(("wrong", name))
            os._exit(1)

    make("all_reduce", fails=False)
    dist.barrier()
    if call == "destroy":
        if victim:
            _fail_soon(plan, pipe)
        dist.destroy_process_group()
        pipe.send(("left", time.monotonic()))
        if victim:
            time.sleep(60)
        return
    if victim and not plan["inside"]:
        # Others may wait for this rank, without more data to send to it.
        time.sleep(plan.get("waits", 0.0))
        _fail(plan, pipe)
    if call not in acts.EDGES:
        make(call, fails=victim and plan["inside"])
    # Ranks that do not depend on the victim succeed. A call of all ranks must fail, unless the fault only slows it.
    dist.barrier()
    pipe.send(("right", time.monotonic()))
    # Its exit would be another event for the others.
    time.sleep(60)


def _fail_soon(plan: dict, pipe: Any) -> None:
    """Fails now, or shortly, while this rank is in a blocking call."""
    if not plan["inside"]:
        _fail(plan, pipe)
    after = random.Random(plan["seed"]).uniform(0, _SOON)
    threading.Timer(after, _fail, (plan, pipe)).start()


def _fail(plan: dict, pipe: Any) -> None:
    pipe.send(("fault", time.monotonic()))
    if plan["fault"] in network.FAULTS:
        pipe.recv()
        return
    if plan["fault"] == "exit":
        os._exit(0)
    if plan["fault"] == "exception":
        raise RuntimeError("this rank fails before its call")
    os.kill(os.getpid(), signal.SIGKILL if plan["fault"] == "kill" else signal.SIGSTOP)
